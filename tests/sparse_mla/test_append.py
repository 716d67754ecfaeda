"""Appending: the bytes of `pack_mla_cache` in the slots named, and every other byte as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_beam_attn import append_mla_cache
from tests.sparse_mla.calls import FORMATS, POISON, token_places
from tests.sparse_mla.hlo import copies_of_size
from tests.sparse_mla.oracle import BF16, E4M3, HEAD_DIM, TOKEN_BYTES, quantized_token

BLOCKS, PAGE = 4, 3
INT32 = np.iinfo(np.int32)
BF16_WIDTHS = (576, 512)
# Format, padding behind a block's tokens (None: a block for each token's dimensions), dtype.
FORMS = [
    ("v32", None, np.uint8),
    ("v32", 32, np.uint8),
    ("v32", None, np.int8),
    ("v32", 32, E4M3),
    ("model1", None, np.uint8),
    ("model1", 0, np.uint8),
    ("model1", 24, np.int8),
    ("model1", None, E4M3),
    ("bf16", None, BF16),
]


def _dqk(format):
    return HEAD_DIM.get(format, 576)


def poisoned(format, padding, dtype, blocks=BLOCKS):
    """A cache of which every byte is poison."""
    if format == "bf16":
        shape, width = (blocks, PAGE, 1, _dqk(format)), 2
    elif padding is None:
        shape, width = (blocks, PAGE, 1, TOKEN_BYTES[format]), 1
    else:
        shape, width = (blocks, -(-PAGE * TOKEN_BYTES[format] // 16) * 16 + padding), 1
    data = np.full(width * int(np.prod(shape)), POISON, np.uint8)
    return data.view(dtype).reshape(shape)


def appended(cache, keys, slots, format):
    """What appending does, byte by byte; of equal slots the last wins."""
    flat = np.ascontiguousarray(cache).view(np.uint8).reshape(len(cache), -1).copy()
    for key, slot in zip(keys, slots, strict=True):
        if not 0 <= slot < len(cache) * PAGE:
            continue
        if format == "bf16":
            block, offset = divmod(int(slot), PAGE)
            data = key.astype(BF16).view(np.uint8)
            flat[block, offset * data.size : (offset + 1) * data.size] = data
        else:
            block, places = token_places(format, int(slot), PAGE)
            flat[block, places] = np.frombuffer(b"".join(quantized_token(key, format)), np.uint8)
    return flat.view(cache.dtype).reshape(cache.shape)


def keys_for(n, format, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, _dqk(format))) * 2.0 ** rng.integers(-3, 4, (n, 1))).astype(
        dtype
    )


def page_of(cache):
    return PAGE if cache.ndim == 2 else None


@functools.cache
def jitted(format, page_size, donate=False):
    function = functools.partial(append_mla_cache, format=format, page_size=page_size)
    return jax.jit(function, donate_argnums=0 if donate else ())


def check(cache, keys, slots, format):
    got = np.asarray(jitted(format, page_of(cache))(cache, keys, slots))
    want = appended(cache, keys, slots, format)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("format, padding, cache_dtype", FORMS)
def test_all_of_it(format, padding, cache_dtype, dtype):
    """First and last slots of blocks and of the cache; slots outside write nothing."""
    slots = np.array([0, 2, 3, 11, -1, 12, INT32.max, INT32.min, 7], np.int32)
    cache = poisoned(format, padding, cache_dtype)
    check(cache, keys_for(len(slots), format, dtype=dtype), slots, format)


@given(st.sampled_from(FORMATS), st.permutations(range(-3, BLOCKS * PAGE + 3)))
def test_any_slots(format, slots):
    slots = np.array(slots[:6], np.int32)
    check(
        poisoned(format, None, BF16 if format == "bf16" else np.uint8),
        keys_for(6, format),
        slots,
        format,
    )


@pytest.mark.parametrize("format", FORMATS)
def test_nothing_to_write(format):
    cache = poisoned(format, None, BF16 if format == "bf16" else np.uint8)
    check(cache, keys_for(0, format), np.zeros(0, np.int32), format)
    check(cache, keys_for(3, format), np.full(3, -1, np.int32), format)


@pytest.mark.parametrize("format", FORMATS)
def test_nowhere_to_write(format):
    cache = poisoned(format, None, BF16 if format == "bf16" else np.uint8)
    for empty in (cache[:0], cache[:, :0]):
        out = append_mla_cache(empty, keys_for(2, format), np.array([0, 1]), format)
        assert (out.shape, out.dtype) == (empty.shape, empty.dtype)


def test_a_bf16_cache_of_512():
    cache = np.zeros((2, PAGE, 1, 512), BF16)
    key = np.random.default_rng(0).standard_normal((1, 512)).astype(np.float32)
    got = np.asarray(append_mla_cache(cache, key, np.array([4]), "bf16"))
    np.testing.assert_array_equal(got[1, 1, 0], key[0].astype(BF16))
    assert np.count_nonzero(got) == np.count_nonzero(got[1, 1])


def test_int64_slots_are_clamped_and_not_wrapped():
    """Wrapped, 2**32 would be slot 0."""
    cache = poisoned("v32", None, np.uint8)
    slots = np.array([2**32, 2**32 + 1, -(2**32), 5])
    want = appended(cache, keys_for(4, "v32"), slots, "v32")
    np.testing.assert_array_equal(append_mla_cache(cache, keys_for(4, "v32"), slots, "v32"), want)
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(True), strict[0], strict[1]:
        got = append_mla_cache(cache, keys_for(4, "v32"), jnp.asarray(slots), "v32")
    np.testing.assert_array_equal(got, want)


# A CPU has no scatter of float8: the reference reads and writes such a cache once as uint8.
@pytest.mark.parametrize("format, padding, dtype", [f for f in FORMS if f[2] != E4M3])
def test_in_place_when_donated(format, padding, dtype):
    """The program has no array of the cache's size but the cache."""
    cache = poisoned(format, padding, dtype, blocks=64)
    arguments = (keys_for(2, format), np.array([5, 100], np.int32))
    lowered = jitted(format, page_of(cache), donate=True).lower(cache, *arguments)
    assert not copies_of_size(lowered.compile(), cache.nbytes)
    donated = jnp.asarray(cache)
    got = jitted(format, page_of(cache), donate=True)(donated, *arguments)
    assert donated.is_deleted()
    np.testing.assert_array_equal(
        np.asarray(got).view(np.uint8), appended(cache, *arguments, format).view(np.uint8)
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("jit", [False, True])
def test_the_old_cache_stays_as_it_is_when_not_donated(format, jit):
    cache = jnp.asarray(poisoned(format, None, BF16 if format == "bf16" else np.uint8))
    before = np.array(cache)
    function = jitted(format, None) if jit else functools.partial(append_mla_cache, format=format)
    new = function(cache, keys_for(2, format), np.array([1, 4], np.int32))
    np.testing.assert_array_equal(np.asarray(cache).view(np.uint8), before.view(np.uint8))
    assert (np.asarray(new).view(np.uint8) != before.view(np.uint8)).any()


@pytest.mark.parametrize(
    "format, padding, dtype", [FORMS[0], FORMS[1], FORMS[4], FORMS[6], FORMS[8]]
)
def test_in_the_carry_of_scan(format, padding, dtype):
    """A token a step, without a copy of the cache."""
    cache = poisoned(format, padding, dtype, blocks=64)
    keys, slots = keys_for(5, format), np.array([0, 9, -1, 130, 77], np.int32)

    def step(cache, x):
        key, slot = x
        return append_mla_cache(cache, key[None], slot[None], format, page_of(cache)), None

    function = jax.jit(lambda c, *xs: jax.lax.scan(step, c, xs)[0], donate_argnums=0)
    assert not copies_of_size(function.lower(cache, keys, slots).compile(), cache.nbytes)
    got = np.asarray(function(jnp.asarray(cache), keys, slots))
    want = appended(cache, keys, slots, format)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("format, padding, dtype", [FORMS[0], FORMS[6], FORMS[7], FORMS[8]])
@pytest.mark.parametrize("mapped", ["keys slots", "slots", "keys", ""])
def test_vmap(format, padding, dtype, mapped):
    """A pool for each call; a slot just past the end of one lies in the next."""
    caches = np.stack([poisoned(format, padding, dtype)] * 3)
    keys = np.stack([keys_for(5, format, seed) for seed in range(3)])
    slots = np.array([[0, 12, -1, 3, 11], [12, 13, -12, 2, 5], [-1, 7, 24, 1, 0]], np.int32)
    keys = keys if "keys" in mapped else keys[0]
    slots = slots if "slots" in mapped else slots[1]
    axes = (0, 0 if "keys" in mapped else None, 0 if "slots" in mapped else None)
    function = functools.partial(append_mla_cache, format=format, page_size=page_of(caches[0]))
    got = np.asarray(jax.jit(jax.vmap(function, axes))(caches, keys, slots))
    for n in range(3):
        want = appended(
            caches[n],
            keys[n] if "keys" in mapped else keys,
            slots[n] if "slots" in mapped else slots,
            format,
        )
        np.testing.assert_array_equal(got[n].view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("axes", [(None, 0, None), (None, None, 0), (None, 0, 0)])
def test_vmap_refuses_mapped_updates_of_one_cache(axes):
    cache, keys = poisoned("v32", None, np.uint8), keys_for(2, "v32")
    slots = np.array([0, 1], np.int32)
    operands = [
        x if axis is None else np.stack([x, x])
        for x, axis in zip((cache, keys, slots), axes, strict=True)
    ]
    function = functools.partial(append_mla_cache, format="v32")
    with pytest.raises(ValueError, match="cache: got one cache for all calls of a vmap"):
        jax.vmap(function, axes)(*operands)
