"""Writing new caches: the bytes of an independent packer, and what reading them gives back."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_beam_attn import pack_mla_cache, unpack_mla_cache
from tests.sparse_mla.oracle import BF16, HEAD_DIM, TOKEN_BYTES, pack_oracle, unpack_oracle
from tests.tolerances import E4M3_ROUNDING, FEW_OPERATIONS

FORMATS = ("v32", "model1")
GROUP = {"v32": (512, 128), "model1": (448, 64)}
FLOOR = np.float32(1e-4)


@functools.cache
def _jitted(format, block_bytes=None):
    return jax.jit(functools.partial(pack_mla_cache, format=format, block_bytes=block_bytes))


def keys_of_all_sizes(format, blocks=4, page_size=5, seed=0):
    """Keys whose groups differ in size by up to 2**60."""
    rng = np.random.default_rng(seed)
    shape = (blocks, page_size, 1, HEAD_DIM[format])
    size = np.repeat(rng.uniform(-40, 20, (*shape[:3], HEAD_DIM[format] // 64)), 64, axis=-1)
    return (rng.standard_normal(shape) * 2**size).astype(np.float32)


def _amax_of(format, amax):
    """One block with a token for each largest number; the others of a group are half as large."""
    keys = np.zeros((1, len(amax), 1, HEAD_DIM[format]), np.float32)
    keys[0, :, 0] = np.asarray(amax, np.float32)[:, None] / 2
    keys[0, :, 0, ::64] *= 2
    return keys


def _scales(cache, format):
    """Scales of the tokens of one unpadded block: f32 [n, 4] or exponents [n, 7]."""
    n = cache.shape[1]
    if format == "v32":
        return np.ascontiguousarray(cache[0, :, 0, 512:528]).view(np.float32)
    return cache[0].ravel()[576 * n :].reshape(n, 8)[:, :7].astype(int) - 127


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("format", FORMATS)
def test_bytes(format, dtype, jit):
    keys = keys_of_all_sizes(format).astype(dtype)
    pack = _jitted(format) if jit else functools.partial(pack_mla_cache, format=format)
    got = np.asarray(pack(keys))
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, pack_oracle(keys, format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("page_size, padding", [(1, 0), (3, 8), (7, 24), (64, 64)])
def test_padded_blocks(format, page_size, padding):
    keys = keys_of_all_sizes(format, 2, page_size)
    block_bytes = -(-page_size * TOKEN_BYTES[format] // 16) * 16 + (padding // 16) * 16
    block_bytes += padding % 16 if format == "model1" else 0
    got = np.asarray(_jitted(format, block_bytes)(keys))
    assert got.shape == (2, block_bytes)
    np.testing.assert_array_equal(got, pack_oracle(keys, format, block_bytes))
    assert not got[:, page_size * TOKEN_BYTES[format] :].any()


@given(st.sampled_from(FORMATS), st.lists(st.floats(width=32, allow_nan=False), min_size=64))
def test_bytes_of_any_floats(format, values):
    """Infinity too: its group becomes NaN in both. Rope is not scaled."""
    keys = np.resize(np.array(values[:128], np.float32), (1, 1, 1, HEAD_DIM[format]))
    with np.errstate(all="ignore"):
        keys = np.where(np.isinf(keys), np.float32(3e38), keys)
        want = pack_oracle(keys, format)
    np.testing.assert_array_equal(np.asarray(_jitted(format)(keys)), want)


def test_v32_scale_is_amax_times_the_rounded_reciprocal():
    amax = np.random.default_rng(0).uniform(1e-4, 1e3, 200).astype(np.float32)
    scales = _scales(np.asarray(_jitted("v32")(_amax_of("v32", amax))), "v32")
    np.testing.assert_array_equal(scales, np.tile((amax * np.float32(1 / 448))[:, None], 4))
    # Division would give other bits for some.
    assert (scales[:, 0] != amax / np.float32(448)).any()


def test_model1_scale_is_rounded_up_and_an_exact_power_stays():
    steps = np.arange(-12, 13)
    exact = (np.float32(2.0) ** steps / np.float32(1 / 448)).astype(np.float32)
    assert (exact * np.float32(1 / 448) == np.float32(2.0) ** steps).all()
    for amax, up in ((exact, 0), (np.nextafter(exact, np.inf) * np.float32(1 + 1e-6), 1)):
        scales = _scales(np.asarray(_jitted("model1")(_amax_of("model1", amax))), "model1")
        np.testing.assert_array_equal(scales, np.tile((steps + up)[:, None], 7))


@pytest.mark.parametrize("format", FORMATS)
def test_smallest_amax(format):
    """Zeros, and all below 1e-4, have the scale of 1e-4."""
    cache = np.asarray(_jitted(format)(_amax_of(format, [0, 1e-45, 1e-30, 9.9e-5, 1e-4])))
    scales = _scales(cache, format)
    want = FLOOR * np.float32(1 / 448)
    np.testing.assert_array_equal(scales, want if format == "v32" else np.ceil(np.log2(want)))
    assert not np.asarray(unpack_mla_cache(cache, format))[0, 0].any()


def test_pad_byte_of_model1_is_zero():
    cache = np.asarray(_jitted("model1")(keys_of_all_sizes("model1", 2, 5)))
    pads = cache.reshape(2, -1)[:, 576 * 5 :].reshape(2, 5, 8)[..., 7]
    assert not pads.any()


@pytest.mark.parametrize("format", FORMATS)
def test_what_comes_back(format):
    """e4m3 keeps 3 bits after the first, down to 2**-6, and steps of 2**-9 below; rope is bf16."""
    keys = keys_of_all_sizes(format, seed=1)
    got = np.asarray(unpack_mla_cache(_jitted(format)(keys), format))
    want = unpack_oracle(pack_oracle(keys, format), format, 5)
    np.testing.assert_array_equal(got, want.astype(np.float32))
    got = got.astype(np.float64)
    quantized, group = GROUP[format]
    values = keys[..., :quantized].astype(np.float64).reshape(*keys.shape[:3], -1, group)
    error = np.abs(got[..., :quantized].reshape(values.shape) - values)
    amax = np.maximum(np.abs(values).max(-1, keepdims=True), 1e-4)
    largest_scale = amax / 448 * (1 if format == "v32" else 2)
    assert (error <= np.maximum(np.abs(values) * 2.0**-4, largest_scale * 2.0**-10) * 1.0001).all()
    np.testing.assert_array_equal(
        got[..., quantized:], keys[..., quantized:].astype(BF16).astype(np.float64)
    )


@pytest.mark.parametrize("format", FORMATS)
def test_packing_again_what_came_back_changes_nothing(format):
    cache = _jitted(format)(keys_of_all_sizes(format, seed=2))
    again = unpack_mla_cache(_jitted(format)(unpack_mla_cache(cache, format)), format)
    back = np.asarray(unpack_mla_cache(cache, format))
    np.testing.assert_allclose(again, back, rtol=FEW_OPERATIONS, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_infinity_stay_visible(format):
    """Never a finite number in place of one that is not."""
    quantized, group = GROUP[format]
    for bad in (np.nan, np.inf, -np.inf):
        keys = np.ones((1, 1, 1, HEAD_DIM[format]), np.float32)
        keys[..., 5] = keys[..., quantized] = bad
        got = np.asarray(unpack_mla_cache(_jitted(format)(keys), format))[0, 0, 0]
        assert np.isnan(got[5])
        assert np.isnan(got[:group]).all()
        np.testing.assert_array_equal(got[quantized], np.float32(bad))
        np.testing.assert_allclose(got[group:quantized], 1, rtol=E4M3_ROUNDING)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("blocks, page_size", [(0, 3), (2, 0)])
def test_nothing(format, blocks, page_size):
    keys = np.zeros((blocks, page_size, 1, HEAD_DIM[format]), np.float32)
    assert pack_mla_cache(keys, format).shape == (blocks, page_size, 1, TOKEN_BYTES[format])
    if page_size:
        assert pack_mla_cache(keys, format, 3 * 656).shape == (blocks, 3 * 656)
