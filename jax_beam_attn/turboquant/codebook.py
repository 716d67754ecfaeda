"""What keys are quantised with: an orthogonal rotation and a scalar codebook.

A rotation spreads a key evenly: the coordinates of a rotated unit vector of size D are nearly
normal, N(0, 1/D), whatever the vector. One codebook for that distribution then serves all keys.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn._core import checks

# Sizes that are no power of two: Paley's matrix of that size, then Sylvester's doubling.
_PALEY_SIZE = {80: 20, 96: 12}
_POWERS_OF_TWO = (8, 16, 32, 64, 128, 256)


def hadamard_rotation(head_dim: int, key: jax.Array | None = None) -> jax.Array:
    """An orthogonal matrix of entries +-1/sqrt(D).

    Args:
        head_dim: D, a power of two from 8 to 256 (Sylvester's matrix), 80 (20 x 4) or 96 (12 x 8).
        key: A PRNG key; then the columns get random signs, so that no input is singled out.

    Returns:
        f32 [D, D].

    Raises:
        ValueError: For another size.

    Source: the rotation of TurboQuant, as in vLLM.

    Example:
        >>> rotation = hadamard_rotation(80)
        >>> bool(jnp.allclose(rotation @ rotation.T, jnp.eye(80), atol=1e-6))
        True
    """
    checks.one_of("head_dim", head_dim, (*_POWERS_OF_TWO, *_PALEY_SIZE))
    matrix = np.ones((1, 1))
    if head_dim in _PALEY_SIZE:
        matrix = _paley(_PALEY_SIZE[head_dim])
    while len(matrix) < head_dim:
        matrix = np.kron(matrix, [[1.0, 1.0], [1.0, -1.0]])
    rotation = jnp.asarray(matrix / math.sqrt(head_dim), jnp.float32)
    if key is None:
        return rotation
    return rotation * jax.random.rademacher(key, (1, head_dim), jnp.float32)


def _paley(size: int) -> np.ndarray:
    """Paley's Hadamard matrix, for size - 1 a prime that is 3 modulo 4.

    With Q[i, j] = 1 where i - j is a square modulo that prime, -1 where not, 0 on the diagonal,
    it is I + S for the skew S that has Q inside a border of ones.
    """
    prime = size - 1
    squares = {x * x % prime for x in range(1, prime)}
    character = [0, *(1 if x in squares else -1 for x in range(1, prime))]
    matrix = np.eye(size)
    matrix[0, 1:] += 1
    matrix[1:, 0] -= 1
    matrix[1:, 1:] += [[character[(i - j) % prime] for j in range(prime)] for i in range(prime)]
    return matrix


def lloyd_max_centroids(bits: int, head_dim: int) -> jax.Array:
    """The codebook with the least mean squared error for N(0, 1/D), in ascending order.

    Args:
        bits: 3 or 4.
        head_dim: D.

    Returns:
        f32 [2**bits].

    Raises:
        ValueError: For other bits, or D < 1.

    Source: the quantiser of Lloyd (1982) and Max (1960).

    Example:
        >>> [round(float(c), 3) for c in lloyd_max_centroids(3, 1)[4:]]
        [0.245, 0.756, 1.344, 2.152]
    """
    checks.one_of("bits", bits, (3, 4))
    checks.at_least_one("head_dim", head_dim)
    return jnp.asarray(_unit_centroids(bits) / math.sqrt(head_dim), jnp.float32)


@functools.cache
def _unit_centroids(bits: int) -> np.ndarray:
    """Lloyd's iteration for N(0, 1), on the positive half: the optimum is symmetric.

    Each centroid becomes the mean of its cell, (pdf(low) - pdf(high)) / (cdf(high) - cdf(low)),
    and the cells' borders are the midpoints, until nothing moves.
    """
    half = 2 ** (bits - 1)
    centroids = (np.arange(half) + 0.5) * 3.0 / half
    moved = 1.0
    while moved > 1e-12:
        borders = np.array([0.0, *(centroids[:-1] + centroids[1:]) / 2, np.inf])
        pdf = np.exp(-(borders**2) / 2) / math.sqrt(2 * math.pi)
        cdf = np.array([math.erf(border / math.sqrt(2)) / 2 for border in borders])
        new = -np.diff(pdf) / np.diff(cdf)
        moved = np.max(np.abs(new - centroids))
        centroids = new
    return np.concatenate([-centroids[::-1], centroids])
