"""Rotations, codebooks and what they cost in accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import (
    TurboQuantFormat,
    hadamard_rotation,
    lloyd_max_centroids,
    turboquant_dequantize,
    turboquant_store,
)
from tests.tolerances import FEW_OPERATIONS

SIZES = (8, 16, 32, 64, 80, 96, 128, 256)


@pytest.mark.parametrize("head_dim", SIZES)
@pytest.mark.parametrize("seed", [None, 0])
def test_rotations_are_hadamard(head_dim, seed):
    key = None if seed is None else jax.random.key(seed)
    rotation = hadamard_rotation(head_dim, key)
    assert (rotation.shape, rotation.dtype) == ((head_dim, head_dim), jnp.float32)
    signs = np.asarray(rotation, np.float64) * head_dim**0.5
    np.testing.assert_allclose(np.abs(signs), 1, rtol=FEW_OPERATIONS)
    whole = np.round(signs).astype(int)
    np.testing.assert_array_equal(whole @ whole.T, head_dim * np.eye(head_dim, dtype=int))


def test_sylvesters_matrix():
    """Entry (i, j) is -1 to the number of common bits."""
    i = np.arange(64)
    common = np.bitwise_count(i[:, None] & i[None])
    np.testing.assert_array_equal(np.asarray(hadamard_rotation(64)), (-1.0) ** common / 8)


def test_keys_give_signs_of_columns():
    plain = np.asarray(hadamard_rotation(64))
    signs = [np.asarray(hadamard_rotation(64, jax.random.key(n))) / plain for n in range(2)]
    for each in signs:
        np.testing.assert_array_equal(each, np.broadcast_to(each[:1], each.shape))
        assert 0 < (each[0] < 0).sum() < 64
    assert (signs[0] != signs[1]).any()
    traced = jax.jit(lambda key: hadamard_rotation(64, key))(jax.random.key(1))
    np.testing.assert_array_equal(np.asarray(traced) / plain, signs[1])


@pytest.mark.parametrize("head_dim", [0, 4, 12, 24, 100, 160, 512, "64"])
def test_other_sizes_raise(head_dim):
    with pytest.raises(ValueError, match="head_dim: got"):
        hadamard_rotation(head_dim)


# Max (1960), table I: the positive half for N(0, 1).
MAX_1960 = {
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("head_dim", [1, 128])
def test_centroids(bits, head_dim):
    centroids = np.asarray(lloyd_max_centroids(bits, head_dim))
    assert (centroids.shape, centroids.dtype) == ((2**bits,), np.float32)
    half = 2 ** (bits - 1)
    np.testing.assert_allclose(centroids[half:] * head_dim**0.5, MAX_1960[bits], rtol=5e-4)
    np.testing.assert_array_equal(centroids, -centroids[::-1])


@pytest.mark.parametrize("bits", [0, 2, 5, 8, "4"])
def test_other_bits_raise(bits):
    with pytest.raises(ValueError, match="bits: got"):
        lloyd_max_centroids(bits, 128)


# Relative mean squared errors on normal numbers at D = 128.
KEY_ERROR = {3: 0.0337, 4: 0.0092, 8: 0.0007}
VALUE_ERROR = {3: 0.0458, 4: 0.0100}
ROUND_OF = {0.0007: 0.00005}  # the last digit of what is known


@pytest.mark.parametrize("key_bits, value_bits", [(3, 3), (4, 4), (8, 4), (3, 4)])
@pytest.mark.parametrize("seed", [None, 0])
def test_distortion_of_normal_keys_and_values(key_bits, value_bits, seed):
    format = TurboQuantFormat(128, 8, 16, key_bits, value_bits, norm_correction=True)
    rotation = hadamard_rotation(128, None if seed is None else jax.random.key(seed))
    fp8 = key_bits == 8
    centroids = None if fp8 else lloyd_max_centroids(key_bits, 128)
    rng = np.random.default_rng(1)
    key, value = rng.standard_normal((2, 2048, 8, 128)).astype(np.float32)
    cache = turboquant_store(
        jnp.zeros(format.cache_shape(128), jnp.uint8),
        key,
        value,
        np.arange(2048),
        format=format,
        rotation=rotation,
        centroids=centroids,
    )
    stored = turboquant_dequantize(cache, format=format, centroids=centroids)
    k, v = (np.asarray(x, np.float64).reshape(2048, 8, 128) for x in stored)
    if not fp8:
        k = k @ np.asarray(rotation, np.float64)  # back: the inverse is the transpose
    for got, want, known in ((k, key, KEY_ERROR[key_bits]), (v, value, VALUE_ERROR[value_bits])):
        error = ((got - want) ** 2).sum() / (want.astype(np.float64) ** 2).sum()
        assert abs(error - known) <= max(0.03 * known, ROUND_OF.get(known, 0)), error
