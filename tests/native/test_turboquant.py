"""The native store on the CPU beside what `jax.numpy` computes; test_store.py runs it too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import TurboQuantFormat, gpu_target, turboquant_store
from jax_beam_attn._core import native
from jax_beam_attn.turboquant.cache import store
from tests.tolerances import TURBOQUANT_CODES, TURBOQUANT_NORM
from tests.turboquant import oracle
from tests.turboquant.calls import FREE, POISON, codebook, random_rotation


@pytest.fixture(autouse=True)
def cpu(built):
    built("cpu")


@functools.cache
def _store(format, implementation):
    def run(cache, key, value, slots, **book):
        operands = {"cache": cache, "key": key, "value": value, "slots": slots}
        operands |= {name: array[None] for name, array in book.items() if array is not None}
        return store(operands, format, implementation=implementation)[0]

    return jax.jit(run)


def both(format, key, value, slots, book, num_blocks=8):
    cache = np.full(format.cache_shape(num_blocks), POISON, np.uint8)
    return (
        np.asarray(_store(format, each)(cache, key, value, slots, **book))
        for each in ("native", "reference")
    )


@pytest.mark.parametrize("key_bits, value_bits, nc", FREE)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_codes_are_those_of_the_reference(key_bits, value_bits, nc, dtype):
    """Those of values all, of keys but for 1 in 10,000 at the border of another."""
    format = TurboQuantFormat(128, 4, 16, key_bits, value_bits, nc)
    rng = np.random.default_rng(key_bits)
    key, value = rng.standard_normal((2, 100, 4, 128)).astype(dtype)
    slots = rng.permutation(128)[:100].astype(np.int32)
    got, want = both(format, key, value, slots, codebook(format))
    got, want = (x.reshape(8, -1) for x in (got, want))
    rows = [
        x[:, : format.metadata_start].reshape(-1, format.key_bytes + format.value_bytes)
        for x in (got, want)
    ]
    of_values = [np.ascontiguousarray(x[:, format.key_bytes :]) for x in rows]
    np.testing.assert_array_equal(*of_values)
    of_keys = [np.ascontiguousarray(x[:, : format.key_bytes]) for x in rows]
    if key_bits == 8:
        np.testing.assert_array_equal(*of_keys)
    else:
        a, b = (np.array(oracle.codes_of(x.tobytes(), key_bits)) for x in of_keys)
        assert np.abs(a - b).max() <= 1 and (a != b).mean() < TURBOQUANT_CODES
    end = format.metadata_start + 2 * 4 * format.num_fields * 16
    metadata = [x[:, format.metadata_start : end].view(np.float16) for x in (got, want)]
    np.testing.assert_allclose(*metadata, rtol=TURBOQUANT_NORM)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_every_number_of_16_bits(dtype):
    """As keys, which become e4m3, and one by one as all values of a head, which are their zero."""
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bits.view(jnp.dtype(dtype))
    size = np.abs(numbers.astype(np.float32))
    # A subnormal float32 is 0 to XLA.
    numbers = numbers[np.isfinite(size) & ((size >= 2.0**-126) | (size == 0))]
    format = TurboQuantFormat(8, 1, 64, 8, 4, False)
    value = np.repeat(numbers, 8).reshape(-1, 1, 8)
    num_blocks = -(-len(value) // 64)
    slots = np.arange(len(value), dtype=np.int32)
    book = {"rotation": None, "centroids": None}
    got, want = both(format, value, value, slots, book, num_blocks)
    np.testing.assert_array_equal(got, want)


def test_groups_have_rotations_and_codebooks_of_their_own():
    """Under vmap, of which either may be shared."""
    format = TurboQuantFormat(16, 2, 4, 4, 4, True)
    book = codebook(format)
    rotations = np.stack([random_rotation(16, seed) for seed in range(3)])
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 3, 5, 2, 16)).astype(np.float32)
    caches = np.full((3, *format.cache_shape(2)), POISON, np.uint8)
    slots = np.array([[0, 7, -1, 3, 8]] * 3, np.int32)
    function = functools.partial(turboquant_store, format=format, centroids=book["centroids"])
    got = jax.jit(jax.vmap(lambda *a: function(*a[:4], rotation=a[4])))(
        caches, key, value, slots, rotations
    )
    for n in range(3):
        one = _store(format, "native")(
            caches[n],
            key[n],
            value[n],
            slots[n],
            rotation=rotations[n],
            centroids=book["centroids"],
        )
        np.testing.assert_array_equal(got[n], one)


def test_the_cache_is_written_in_place():
    format = TurboQuantFormat(64, 2, 16, 4, 4, True)
    book = codebook(format)
    key = value = jnp.ones((3, 2, 64))
    run = jax.jit(functools.partial(turboquant_store, format=format), donate_argnums=0)
    cache = jnp.zeros(format.cache_shape(50), jnp.uint8)
    pointer = cache.unsafe_buffer_pointer()
    got = run(cache, key, value, jnp.array([1, -1, 70]), **book)
    assert got.unsafe_buffer_pointer() == pointer


def test_it_is_for_cpus():
    assert store.handler.unavailable_on_gpu(90) == "the native code is for CPUs"
    format = TurboQuantFormat(64, 1, 16, 8, 4, False)
    token = np.ones((1, 1, 64), np.float32)
    function = functools.partial(turboquant_store, format=format, rotation=None, centroids=None)
    arguments = np.zeros(format.cache_shape(1), np.uint8), token, token, np.zeros(1, np.int32)
    assert native.TURBOQUANT_STORE in jax.jit(function).lower(*arguments).as_text()
    with gpu_target("h200"):
        on_gpu = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert native.TURBOQUANT_STORE not in on_gpu
    # A program that is exported needs no native code on CPUs.
    assert (
        native.TURBOQUANT_STORE
        not in jax.export.export(jax.jit(function))(*arguments).mlir_module()
    )
