"""Writing tokens into paged byte caches: what all cache writers share.

A writer is an operator whose first operand is the cache and whose output replaces it; XLA writes
in place when the cache is donated. A token's slot is block * page_size + offset.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_beam_attn._core import folding


def locate(slots: jax.Array, num_blocks: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Slots as (block, offset); one outside the cache gets a block behind the last.

    `write` drops what is bound for there.
    """
    inside = (slots >= 0) & (slots < num_blocks * page_size)
    page_size = max(page_size, 1)
    return jnp.where(inside, slots // page_size, num_blocks), slots % page_size


def write(cache: jax.Array, block: jax.Array, byte: jax.Array, data: jax.Array) -> jax.Array:
    """Writes bytes into blocks.

    The cache keeps its form and dtype: XLA would copy all of it to change them there and back.

    Args:
        cache: [num_blocks, ...], one byte an element.
        block: i32 [N].
        byte: i32 [N, n], places within the block.
        data: uint8 [N, n].

    Returns:
        The cache with the bytes written.
    """
    data = jax.lax.bitcast_convert_type(data, cache.dtype)
    places = []
    stride = math.prod(cache.shape[1:])
    for size in cache.shape[1:]:
        stride = stride // size if size else 1
        places.append(byte // stride % max(size, 1))
    block = jnp.broadcast_to(block[:, None], byte.shape)
    return cache.at[(block, *places)].set(data, mode="drop")


def fold(
    size: int,
    operands: dict[str, Any],
    mapped: frozenset[str],
    *,
    page_size: int,
    updates: Sequence[str],
    cache: str = "cache",
) -> dict[str, Any]:
    """The vmap rule: mapped caches are laid end to end and their slots shifted.

    Args:
        size: Calls that are mapped over.
        operands: With "slots" and the cache; see `Operator`'s `fold`.
        mapped: Names of the mapped ones.
        page_size: Tokens of a block.
        updates: Names of the operands with one entry for each slot.
        cache: The caller's name of the cache.

    Returns:
        The cache, the slots and the updates of one call.

    Raises:
        ValueError: If the cache is shared by calls that write different things.
    """
    if "cache" not in mapped:
        raise ValueError(
            f"{cache}: got one cache for all calls of a vmap with mapped "
            f"{', '.join(updates)} or slot_mapping, expected a mapped cache: the calls would "
            "each write their own copy"
        )
    slots = folding.batched(operands["slots"], "slots" in mapped, size)
    pool_size = operands["cache"].shape[1] * page_size
    return {
        "cache": folding.pool(operands["cache"], True),
        "slots": folding.shift_into_pool(slots, size, pool_size),
    } | {name: folding.batched(operands[name], name in mapped, size) for name in updates}


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def forward_only(name: str, array: jax.Array) -> jax.Array:
    """The array itself, where operations follow whose derivative JAX takes for zero."""
    return array


@forward_only.defjvp
def _refuse_gradient(name, *_):
    raise NotImplementedError(
        f"{name}: forward-only, bytes have no derivative; wrap the operand in jax.lax.stop_gradient"
    )


def to_bytes(array: jax.Array) -> jax.Array:
    """[..., n] as its little-endian bytes, uint8 [..., n * itemsize]."""
    size = array.shape[-1] * array.dtype.itemsize
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(*array.shape[:-1], size)


def from_bytes(array: jax.Array, dtype: Any) -> jax.Array:
    """Little-endian bytes uint8 [..., n * itemsize] as numbers [..., n]."""
    size = jnp.dtype(dtype).itemsize
    groups = array.reshape(*array.shape[:-1], array.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(groups, dtype)
