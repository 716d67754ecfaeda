"""Folding a vmapped axis of size N into an operator's own batch axis.

The operand of a vmapped call either carries the mapped axis in front or is shared by all N
calls. What has to happen depends on the operand's role:

- batched [B, ...]: becomes [N*B, ...]; a shared one is repeated.
- pool [P, ...] (a paged cache): mapped pools are laid end to end, [N*P, ...], and whatever
  indexes them is shifted; a shared pool stays as it is, once in memory.
- index into a pool: repeated like a batched operand, then shifted where the pool is mapped.
- scalar or vector that may be given once for all or once per sample: a mapped one becomes
  per-sample.
- grouped [R, ...], R = 1 outside vmap: of each of R equal groups of consecutive samples.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def batched(array: jax.Array, mapped: bool, size: int) -> jax.Array:
    """[N, B, ...] or a shared [B, ...] as [N*B, ...]."""
    if not mapped:
        array = jnp.broadcast_to(array, (size, *array.shape))
    return array.reshape(size * array.shape[1], *array.shape[2:])


def pool(array: jax.Array, mapped: bool) -> jax.Array:
    """[N, P, ...] as [N*P, ...]; a shared [P, ...] as it is."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]) if mapped else array


def shift_into_pool(index: jax.Array, size: int, pool_size: int) -> jax.Array:
    """Moves indices of sample n (leading axis [N*B]) into slice n of a pool of N*P entries.

    An index outside [0, P) means "masked" and must stay so: it becomes -1 before anything is
    added to it, or it would reach into a neighbour's slice.
    """
    check_pool(size, pool_size)
    per_sample = index.reshape(size, index.size // max(size, 1))
    offset = jnp.arange(size, dtype=jnp.int32)[:, None] * pool_size
    valid = (per_sample >= 0) & (per_sample < pool_size)
    return jnp.where(valid, per_sample + offset, -1).reshape(index.shape)


def check_pool(size: int, pool_size: int) -> None:
    """Requires that an int32 index reaches every entry of `size` pools laid end to end."""
    if size * pool_size > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"vmap over {size} pools of {pool_size} entries passes 2**31 entries, more than "
            "an int32 index can reach: map over fewer, or loop with jax.lax.map"
        )


def per_sample(array: jax.Array, mapped: bool, size: int, batch: int, rank: int) -> jax.Array:
    """A value of `rank` dimensions that may have a leading batch axis.

    Args:
        array: Shared: [...] or [B, ...]. Mapped: [N, ...] or [N, B, ...].
        mapped: Whether the leading axis is the mapped one.
        size: N.
        batch: B.
        rank: Dimensions of [...], without N and B.

    Returns:
        [...] where it is the same for every sample, else [N*B, ...].
    """
    has_batch = array.ndim - mapped > rank
    if not mapped and not has_batch:
        return array
    if not has_batch:
        array = jnp.broadcast_to(array[:, None], (size, batch, *array.shape[1:]))
    return batched(array, mapped, size)


def grouped(array: jax.Array, mapped: bool, size: int) -> jax.Array:
    """A value of each of R equal groups of samples, [R, ...], as that of N*R groups.

    One for all samples, R = 1, stays so where it is not mapped.
    """
    if not mapped and array.shape[0] == 1:
        return array
    return batched(array, mapped, size)


def of_each(array: jax.Array, count: int) -> jax.Array:
    """[R, ...] as [count, ...]: the value of each of `count` samples or smaller groups."""
    return jnp.repeat(array, count // max(array.shape[0], 1), axis=0)
