"""Storing: the bytes of the interface in the slots named, and every other byte as it was."""

import functools
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_beam_attn import TurboQuantFormat, turboquant_dequantize, turboquant_store
from jax_beam_attn.turboquant.cache import store
from tests import native_code
from tests.sparse_mla.hlo import copies_of_size
from tests.tolerances import (
    F16_ROUNDING,
    FEW_OPERATIONS,
    TURBOQUANT_CODES,
    TURBOQUANT_MIDPOINT,
)
from tests.turboquant import oracle
from tests.turboquant.calls import FREE, POISON, PRESETS, codebook, random_cache

BLOCKS = 4
INT32 = np.iinfo(np.int32)


@pytest.fixture(autouse=True, params=["native", "reference"])
def implementation(request, monkeypatch):
    """What a CPU runs; the public function takes native code where it is there."""
    jitted.cache_clear()
    if request.param == "reference":
        monkeypatch.setattr(store, "handler", None)
    else:
        native_code.require("cpu")


def small(key_bits=4, value_bits=4, nc=True, head_dim=16, heads=2, block_size=3):
    return TurboQuantFormat(head_dim, heads, block_size, key_bits, value_bits, nc)


def poisoned(format, blocks=BLOCKS):
    return np.full(format.cache_shape(blocks), POISON, np.uint8)


def tokens(n, format, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shape = (2, n, format.num_kv_heads, format.head_dim)
    size = 2.0 ** rng.integers(-3, 4, (*shape[:3], 1))
    return (rng.standard_normal(shape) * size).astype(dtype)


@functools.cache
def jitted(format, donate=False):
    function = functools.partial(turboquant_store, format=format)
    return jax.jit(function, donate_argnums=0 if donate else ())


def check(cache, key, value, slots, format, book, got=None):
    """Requires each stored token to be the oracle's, but for codes at the edge of another."""
    if got is None:
        got = jitted(format)(cache, key, value, slots, **book)
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (cache.dtype, cache.shape)
    flat, before = got.reshape(len(cache), -1), cache.reshape(len(cache), -1)
    untouched = np.ones(flat.shape, bool)
    for n, slot in enumerate(slots):
        if not 0 <= slot < len(cache) * format.block_size:
            continue
        block, offset = divmod(int(slot), format.block_size)
        untouched[block, oracle.token_places(format, offset)] = False
        for head in range(format.num_kv_heads):
            _check_token(
                flat[block].tobytes(), offset, head, key[n, head], value[n, head], format, book
            )
    np.testing.assert_array_equal(flat[untouched], before[untouched])


def _check_token(block, offset, head, key, value, format, book):
    key_bytes, value_bytes, *_ = oracle.sizes(format)
    data, metadata = oracle.places(format, offset, head)
    fields = [struct.unpack("<e", block[byte : byte + 2])[0] for byte in metadata]
    key_data = block[data : data + key_bytes]
    value_data = block[data + key_bytes : data + key_bytes + value_bytes]
    if format.key_bits == 8:
        want = np.clip(np.asarray(key, np.float32), -448, 448).astype(oracle.E4M3)
        np.testing.assert_array_equal(np.frombuffer(key_data, np.uint8), want.view(np.uint8))
    else:
        stored_norm, *fields = fields
        codes, norm, margin = oracle.encode_key(key, format, **book)
        got = np.array(oracle.codes_of(key_data, format.key_bits))
        _check_codes(got, codes, margin)
        if (got == codes).all():
            assert abs(stored_norm - norm) <= F16_ROUNDING * norm + 2.0**-25
    codes, scale, low, margin = oracle.encode_value(value, format.value_bits)
    _check_codes(np.array(oracle.codes_of(value_data, format.value_bits)), codes, margin)
    assert abs(fields[0] - scale) <= F16_ROUNDING * scale + 2.0**-25
    assert abs(fields[1] - low) <= F16_ROUNDING * abs(low) + 2.0**-25


def _check_codes(got, want, margin):
    different = got != want
    assert (np.abs(got - want)[different] == 1).all()
    assert (margin[different] <= TURBOQUANT_MIDPOINT).all()


@pytest.mark.parametrize("key_bits, value_bits, nc", FREE)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_all_of_it(key_bits, value_bits, nc, dtype):
    """First and last slots of blocks and of the cache; slots outside write nothing."""
    format = small(key_bits, value_bits, nc)
    slots = np.array([0, 2, 3, 11, -1, 12, INT32.max, INT32.min, 7], np.int32)
    key, value = tokens(len(slots), format, dtype=dtype)
    check(poisoned(format), key, value, slots, format, codebook(format, 0))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [(3, 4), (4, 3), (8, 3)])
def test_head_sizes(head_dim, bits):
    format = small(*bits, head_dim=head_dim, heads=3, block_size=5)
    key, value = tokens(6, format)
    check(poisoned(format), key, value, np.array([0, 4, 5, 9, 19, 1]), format, codebook(format))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("block_size", [8, 16, 128])
def test_presets(preset, block_size):
    sizes = {"head_dim": 128, "num_kv_heads": 8, "block_size": block_size}
    format = TurboQuantFormat.preset(preset, **sizes)
    key, value = tokens(2, format)
    check(poisoned(format, 2), key, value, np.array([1, block_size]), format, codebook(format))


SLOT_BYTES = {64: (100, 70, 62, 54), 128: (196, 134, 118, 102)}


@pytest.mark.parametrize("head_dim", SLOT_BYTES)
def test_slot_bytes(head_dim):
    sizes = {"head_dim": head_dim, "num_kv_heads": 8, "block_size": 16}
    for preset, slot_bytes in zip(PRESETS, SLOT_BYTES[head_dim], strict=True):
        format = TurboQuantFormat.preset(preset, **sizes)
        assert format.slot_bytes == slot_bytes == oracle.sizes(format)[3]
        assert format.block_bytes == 8 * 16 * slot_bytes
        assert format == TurboQuantFormat(**sizes, **bits_of(format))
        assert hash(format) == hash(TurboQuantFormat.preset(preset, **sizes))


def bits_of(format):
    return {n: getattr(format, n) for n in ("key_bits", "value_bits", "norm_correction")}


def ties(format, n, dtype=jnp.bfloat16):
    """Keys and values of few bits, many of them half-way between two codes."""
    values = np.random.default_rng(0).integers(
        -40, 41, (2, n, format.num_kv_heads, format.head_dim)
    )
    return (values / 8).astype(dtype)


def codes_in_float32(value, bits):
    """`oracle.encode_value`'s codes by the float32 operations that all writers share."""
    value = value.astype(np.float32)
    top = np.float32(2**bits - 1)
    low, high = value.min(axis=-1, keepdims=True), value.max(axis=-1, keepdims=True)
    scale = (high - low) * (np.float32(1) / top)
    return ((np.floor((value - low) * (2 / scale)).clip(0, 2 * top) + 1) // 2).astype(int)


def stored_value_codes(cache, format):
    """Codes of all values [slots, Hkv, D] by slot."""
    flat = np.asarray(cache).reshape(len(cache), -1)[:, : format.metadata_start]
    rows = flat.reshape(-1, format.num_kv_heads, format.key_bytes + format.value_bytes)
    data = np.ascontiguousarray(rows[..., format.key_bytes :])
    codes = oracle.codes_of(data.tobytes(), format.value_bits)
    return np.array(codes).reshape(*rows.shape[:2], format.head_dim)


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("jit", [False, True])
def test_values_between_two_codes(bits, jit):
    format = small(8, bits, head_dim=64, heads=8, block_size=16)
    key, value = ties(format, 160)
    book = {"rotation": None, "centroids": None}
    function = jitted(format) if jit else functools.partial(turboquant_store, format=format)
    got = function(poisoned(format, 10), key, value, np.arange(160), **book)
    want = codes_in_float32(value, bits)
    np.testing.assert_array_equal(stored_value_codes(got, format), want)


@pytest.mark.parametrize("key_bits", [3, 4])
def test_how_many_codes_differ(key_bits):
    """Float32's rounding may flip a code at a midpoint, and nothing else."""
    format = small(key_bits, head_dim=128, heads=8, block_size=16)
    book = codebook(format)
    key, value = tokens(200, format)
    got = np.asarray(
        turboquant_store(poisoned(format, 13), key, value, np.arange(200), format=format, **book)
    )
    different = 0
    for n in range(200):
        block = got[n // 16].tobytes()
        for head in range(8):
            data, _ = oracle.places(format, n % 16, head)
            codes = oracle.codes_of(block[data : data + 16 * key_bits], key_bits)
            different += (codes != oracle.encode_key(key[n, head], format, **book)[0]).sum()
    assert different < TURBOQUANT_CODES * 200 * 8 * 128


@pytest.mark.parametrize("key_bits, value_bits, nc", FREE)
def test_dequantize(key_bits, value_bits, nc):
    format = small(key_bits, value_bits, nc, heads=3)
    cache, book = random_cache(format, BLOCKS), codebook(format, 1)
    got = turboquant_dequantize(cache, format=format, centroids=book["centroids"])
    for part, want in zip(got, oracle.dequantized(cache, format, book["centroids"]), strict=True):
        assert part.dtype == jnp.float32
        np.testing.assert_allclose(part, want, rtol=FEW_OPERATIONS, atol=FEW_OPERATIONS)


SATURATING = {
    "key norm past 16 bits": (6000.0, 1.0, 0.0),
    "key squares past 32 bits": (1e25, 1.0, 0.0),
    "values past 16 bits": (1.0, 1e6, 0.0),
    "values far below": (1.0, 1.0, -1e6),
    "values far above": (1.0, 1.0, 1e6),
    "a huge range": (1.0, 3e38, 0.0),
    "nothing but zeros": (0.0, 0.0, 0.0),
    "one value": (1.0, 0.0, 3.0),
}


@pytest.mark.parametrize("key_bits", [3, 4, 8])
@pytest.mark.parametrize("case", SATURATING)
def test_finite_in_is_finite_out(key_bits, case):
    of_key, of_value, offset = SATURATING[case]
    format = small(key_bits, head_dim=128, heads=1)
    key, value = np.clip(tokens(2, format) / 8, -1, 1)
    key, value = key * np.float32(of_key), value * np.float32(of_value) + np.float32(offset)
    slots, book = np.array([1, 5]), codebook(format)
    cache = jitted(format)(poisoned(format), key, value, slots, **book)
    k, v = turboquant_dequantize(cache, format=format, centroids=book["centroids"])
    stored = [np.asarray(x)[slots // 3, slots % 3] for x in (k, v)]
    assert all(np.isfinite(x).all() for x in stored)
    check(poisoned(format), key, value, slots, format, book, cache)


def test_a_direction_survives_a_huge_norm():
    format = small(4, head_dim=64, heads=1)
    key, value = tokens(1, format)
    book = codebook(format)
    run = functools.partial(jitted(format), poisoned(format), slot_mapping=np.array([0]), **book)
    usual, huge = (np.asarray(run(key=k, value=value)) for k in (key, key * np.float32(2.0**90)))
    data, _ = oracle.places(format, 0, 0)
    np.testing.assert_array_equal(
        usual[0].ravel()[data : data + 32], huge[0].ravel()[data : data + 32]
    )


@given(st.sampled_from([3, 4, 8]), st.permutations(range(-3, BLOCKS * 3 + 3)))
def test_any_slots(key_bits, slots):
    format = small(key_bits)
    slots = np.array(slots[:6], np.int32)
    key, value = tokens(6, format)
    check(poisoned(format), key, value, slots, format, codebook(format))


def test_nothing_to_write_and_nowhere():
    format = small()
    book = codebook(format)
    key, value = tokens(3, format)
    none = np.full(3, -1, np.int32)
    for cache, k, v, slots in (
        (poisoned(format), key[:0], value[:0], none[:0]),
        (poisoned(format), key, value, none),
        (poisoned(format, 0), key, value, np.arange(3)),
    ):
        np.testing.assert_array_equal(jitted(format)(cache, k, v, slots, **book), cache)


def test_int64_slots_are_clamped_and_not_wrapped():
    """Wrapped, 2**32 would be slot 0."""
    format = small()
    slots = np.array([2**32, 2**32 + 1, -(2**32), 5])
    key, value = tokens(4, format)
    book = codebook(format)
    got = turboquant_store(poisoned(format), key, value, slots, format=format, **book)
    check(poisoned(format), key, value, slots, format, book, got)
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(True), strict[0], strict[1]:
        got = turboquant_store(
            poisoned(format), key, value, jnp.asarray(slots), format=format, **book
        )
    check(poisoned(format), key, value, slots, format, book, got)


def test_in_place_when_donated():
    """The program has no array of the cache's size but the cache."""
    format = small()
    cache = poisoned(format, 200)
    key, value = tokens(2, format)
    arguments = key, value, np.array([5, 100], np.int32)
    book = codebook(format)
    lowered = jitted(format, donate=True).lower(cache, *arguments, **book)
    assert not copies_of_size(lowered.compile(), cache.nbytes)
    donated = jnp.asarray(cache)
    got = jitted(format, donate=True)(donated, *arguments, **book)
    assert donated.is_deleted()
    check(cache, *arguments, format, book, got)


@pytest.mark.parametrize("jit", [False, True])
def test_the_old_cache_stays_as_it_is_when_not_donated(jit):
    format = small()
    cache = jnp.asarray(poisoned(format))
    function = jitted(format) if jit else functools.partial(turboquant_store, format=format)
    new = function(cache, *tokens(2, format), np.array([1, 4], np.int32), **codebook(format))
    np.testing.assert_array_equal(cache, poisoned(format))
    assert (np.asarray(new) != poisoned(format)).any()


def test_in_the_carry_of_scan():
    """A token a step, without a copy of the cache."""
    format = small()
    cache, book = poisoned(format, 200), codebook(format)
    key, value = tokens(5, format)
    slots = np.array([0, 9, -1, 130, 77], np.int32)

    def step(cache, x):
        key, value, slot = (part[None] for part in x)
        return turboquant_store(cache, key, value, slot, format=format, **book), None

    function = jax.jit(lambda c, *xs: jax.lax.scan(step, c, xs)[0], donate_argnums=0)
    compiled = function.lower(cache, key, value, slots).compile()
    assert not copies_of_size(compiled, cache.nbytes)
    check(cache, key, value, slots, format, book, compiled(jnp.asarray(cache), key, value, slots))


@pytest.mark.parametrize("mapped", [{"key", "value", "slots"}, {"slots"}, {"rotation"}, set()])
@pytest.mark.parametrize("key_bits", [4, 8])
def test_vmap(mapped, key_bits):
    """A cache for each call; a slot just past the end of one lies in the next."""
    format = small(key_bits)
    key, value = (np.stack([tokens(5, format, n)[i] for n in range(3)]) for i in range(2))
    slots = np.array([[0, 12, -1, 3, 11], [12, 13, -12, 2, 5], [-1, 7, 24, 1, 0]], np.int32)
    books = [codebook(format, n) for n in range(3)]
    all_of = {"key": key, "value": value, "slots": slots}
    if key_bits != 8:
        all_of |= {name: np.stack([book[name] for book in books]) for name in books[0]}
    axes = {name: 0 if name in mapped else None for name in all_of}
    given = {name: x if name in mapped else x[1] for name, x in all_of.items()}

    def function(cache, given):
        book = {name: given.get(name) for name in ("rotation", "centroids")}
        arguments = given["key"], given["value"], given["slots"]
        return turboquant_store(cache, *arguments, format=format, **book)

    caches = np.stack([poisoned(format)] * 3)
    got = jax.jit(jax.vmap(function, (0, axes)))(caches, given)
    for n in range(3):
        of_call = {name: x[n] if name in mapped else x for name, x in given.items()}
        book = {name: of_call.pop(name, None) for name in ("rotation", "centroids")}
        check(caches[n], *of_call.values(), format, book, got[n])


def test_vmap_refuses_mapped_updates_of_one_cache():
    format = small()
    key, value = (np.stack([x, x]) for x in tokens(2, format))
    function = functools.partial(turboquant_store, format=format, **codebook(format))
    with pytest.raises(ValueError, match="kv_cache: got one cache for all calls of a vmap"):
        jax.vmap(function, (None, 0, 0, None))(poisoned(format), key, value, np.array([0, 1]))
