"""Reading caches that anyone may have written: every byte there is, against the oracle."""

import functools

import jax
import numpy as np
import pytest

from jax_beam_attn import unpack_mla_cache
from tests.sparse_mla.oracle import E4M3, HEAD_DIM, TOKEN_BYTES, unpack_oracle
from tests.tolerances import SMALLEST_NORMAL

FORMATS = ("v32", "model1")
SCALES = [0.0, -0.0, 1.0, -1.5, 0.01171875, 1 / 3, -3e38, 3e38, 1e-30, 1.2e-38]
NOT_FINITE = [np.inf, -np.inf, np.nan]


@functools.cache
def _jitted(format, page_size):
    return jax.jit(functools.partial(unpack_mla_cache, format=format, page_size=page_size))


def check_unpack(cache, format, page_size, atol=0.0):
    """Requires float32 to hold what the oracle reads, and NaN and inf where it does."""
    got = np.asarray(_jitted(format, page_size if cache.ndim == 2 else None)(cache))
    assert got.dtype == np.float32
    with np.errstate(over="ignore", invalid="ignore"):
        want = unpack_oracle(cache, format, page_size).astype(np.float32)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def _random_bytes(shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _with_scales(scales):
    """A v32 cache of one block: every e4m3 byte twice under each scale."""
    cache = np.zeros((1, len(scales), 1, 656), np.uint8)
    cache[..., :512] = np.tile(np.arange(256), 2)
    for offset, scale in enumerate(scales):
        cache[0, offset, 0, 512:528] = np.full(4, scale, np.float32).view(np.uint8)
    return cache


@pytest.mark.parametrize("scales", [SCALES, NOT_FINITE], ids=["finite", "not finite"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_every_e4m3_byte_under_any_f32_scale(scales):
    check_unpack(_with_scales(scales), "v32", len(scales), atol=SMALLEST_NORMAL)


def test_subnormal_f32_scales():
    check_unpack(_with_scales([1e-45, -1e-39, 1.1e-38]), "v32", 3, atol=448 * SMALLEST_NORMAL)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_every_e4m3_byte_under_every_e8m0_byte():
    """448 of the 256 bytes under each of the 256 scales; 0 is 2**-127, 255 is NaN."""
    cache = np.zeros((256, 1, 1, 584), np.uint8)
    cache[..., :448] = np.arange(448) % 256
    cache[..., 576:583] = np.arange(256)[:, None, None, None]
    check_unpack(cache, "model1", 1, atol=SMALLEST_NORMAL)
    got = np.asarray(_jitted("model1", None)(cache))[:, 0, 0]
    assert np.isnan(got[255, :448]).all()
    assert (got[127, :127] == np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)).all()


def test_each_group_has_its_own_scale():
    for format in FORMATS:
        kind = np.float32 if format == "v32" else np.uint8
        cache = np.full((1, 1, 1, TOKEN_BYTES[format]), 0x38, np.uint8)  # 1.0
        at = 512 if format == "v32" else 576
        groups, width = (4, 128) if format == "v32" else (7, 64)
        scales = np.arange(1, groups + 1) if format == "v32" else 127 + np.arange(groups)
        data = scales.astype(kind).view(np.uint8)
        cache[..., at : at + data.size] = data
        want = np.repeat(scales if format == "v32" else 2.0 ** np.arange(groups), width)
        got = np.asarray(unpack_mla_cache(cache, format))[0, 0, 0]
        np.testing.assert_array_equal(got[: want.size], want)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("padding", [None, 0, 48])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_arbitrary_bytes(format, padding, page_size):
    """Any scale: NaN, inf and overflow are compared too. Padding is never read: its bytes vary."""
    block_bytes = page_size * TOKEN_BYTES[format]
    if padding is None:
        shape = (2, page_size, 1, TOKEN_BYTES[format])
    else:
        shape = (2, -(-block_bytes // 16) * 16 + padding)
    check_unpack(_random_bytes(shape), format, page_size, atol=448 * SMALLEST_NORMAL)


@pytest.mark.parametrize("dtype", [np.int8, E4M3])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("padded", [False, True])
def test_other_dtypes_of_a_byte(format, dtype, padded):
    shape = (2, 3 * TOKEN_BYTES[format] + 8) if padded else (2, 3, 1, TOKEN_BYTES[format])
    cache = _random_bytes(shape if format == "model1" or not padded else (2, 3 * 656 + 16))
    page_size = 3 if padded else None
    want = _jitted(format, page_size)(cache)
    got = _jitted(format, page_size)(cache.view(dtype))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("blocks, page_size", [(0, 3), (2, 0)])
def test_nothing(format, blocks, page_size):
    cache = np.zeros((blocks, page_size, 1, TOKEN_BYTES[format]), np.uint8)
    got = unpack_mla_cache(cache, format)
    assert got.shape == (blocks, page_size, 1, HEAD_DIM[format])
