"""Which part of the work each thread block takes, made on the device from the lengths.

A row is one query token of one sample; its work is its listed tokens in blocks of 64, main cache
first. Laid end to end, with a fixed overhead in front of each row, all rows form a line that is
cut into `num_parts` pieces of equal length. Part p covers everything from its beginning to the
beginning of part p + 1, so a row that is longer than it was when the schedule was made loses
nothing: its last part takes the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp

from jax_beam_attn._core import checks

BLOCK = 64  # tokens
OVERHEAD = 5  # what starting a row costs, in blocks: FlashMLA's estimate for Hopper
_DEFAULT_PARTS = 132


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("begin", "first_slot"),
    meta_fields=("batch", "seqlen_q", "num_heads", "topk", "extra_topk"),
)
@dataclasses.dataclass(frozen=True)
class MlaSchedule:
    """An assignment of rows to parts, shared by all layers of a step.

    Attributes:
        begin: i32 [num_parts + 1, 2], row and block within the row where each part begins; the
            last entry is (rows, 0).
        first_slot: i32 [rows + 1]; row r's partial results are slots first_slot[r] up to
            first_slot[r + 1], one for each part that takes a share of it.
        batch, seqlen_q, num_heads, topk, extra_topk: The shape it was made for.
    """

    begin: jax.Array
    first_slot: jax.Array
    batch: int
    seqlen_q: int
    num_heads: int
    topk: int
    extra_topk: int

    @property
    def num_parts(self) -> int:
        """Parts that the work is cut into."""
        return self.begin.shape[-2] - 1


# A schedule may be an argument or a result of an exported program.
jax.export.register_pytree_node_serialization(
    MlaSchedule,
    serialized_name="jax_beam_attn.MlaSchedule",
    serialize_auxdata=lambda shape: json.dumps(shape).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)


def mla_schedule(
    topk_length: jax.Array | None = None,
    *,
    batch: int,
    seqlen_q: int,
    num_heads: int,
    topk: int,
    extra_topk: int = 0,
    extra_topk_length: jax.Array | None = None,
    num_parts: int | None = None,
) -> MlaSchedule:
    """Balances the rows of `sparse_mla_decode` calls over the SMs.

    Any schedule of the right shape gives the right result, whatever lengths it was made for; a
    fitting one is faster. Make it once a step and pass it to every layer.

    Args:
        topk_length: int [B] or [B, Sq], as in the call; may be traced.
        batch: B.
        seqlen_q: Sq.
        num_heads: Hq.
        topk: Listed tokens of a query.
        extra_topk: Those of the extra cache.
        extra_topk_length: int [B] or [B, Sq].
        num_parts: Parts to balance over; default 132, the SMs of an H200.

    Returns:
        The schedule, a pytree.

    Raises:
        ValueError: For a wrong shape or number.
        TypeError: For a wrong dtype.

    Source: the tile scheduler metadata of FlashMLA, with another cut.

    Example:
        >>> schedule = mla_schedule(
        ...     jnp.array([64, 640]), batch=2, seqlen_q=1, num_heads=64, topk=640, num_parts=2
        ... )
        >>> schedule.begin.tolist()  # part 1 begins in row 1, at its block 0
        [[0, 0], [1, 0], [2, 0]]
    """
    for name, value in (("batch", batch), ("seqlen_q", seqlen_q), ("topk", topk)):
        checks.at_least_zero(name, value)
    checks.at_least_zero("extra_topk", extra_topk)
    checks.at_least_one("num_heads", num_heads)
    num_parts = _DEFAULT_PARTS if num_parts is None else num_parts
    checks.at_least_one("num_parts", num_parts)

    shape = (batch, seqlen_q, num_heads, topk, extra_topk)
    constant = topk_length is None and extra_topk_length is None
    # XLA does not fold the search within `_cut`, so a constant is made while tracing.
    with jax.ensure_compile_time_eval() if constant else contextlib.nullcontext():
        blocks = _blocks("topk_length", topk_length, batch, seqlen_q, topk)
        blocks += _blocks("extra_topk_length", extra_topk_length, batch, seqlen_q, extra_topk)
        return MlaSchedule(*_cut(blocks, num_parts), *shape)


def _cut(blocks: jax.Array, num_parts: int) -> tuple[jax.Array, jax.Array]:
    """Cuts rows of so many blocks into parts: `begin` and `first_slot` of the schedule."""
    rows = blocks.shape[0]
    cost = blocks + OVERHEAD
    end = jnp.cumsum(cost, dtype=jnp.int32)
    start = end - cost
    total = end[-1] if rows else jnp.int32(0)
    # Parts of equal length; rounding up leaves the last ones short, or empty.
    length = (total + num_parts - 1) // num_parts
    position = jnp.minimum(jnp.arange(num_parts + 1, dtype=jnp.int32) * length, total)
    row = jnp.searchsorted(end, position, side="right").astype(jnp.int32)
    row_start = jnp.append(start, total)[row]
    row_blocks = jnp.append(blocks, 0)[row]
    # A cut within a row's overhead falls on its first block.
    block = jnp.clip(position - row_start - OVERHEAD, 0, row_blocks)
    begin = jnp.stack([row, block], axis=1).astype(jnp.int32)

    # Row r is shared by the parts from the one it begins in to the one that holds its last block:
    # one more than the cuts strictly inside it.
    inside = (block > 0).astype(jnp.int32)
    cuts = jnp.zeros(rows + 1, jnp.int32).at[row].add(inside, mode="drop")[:rows]
    first_slot = jnp.append(0, jnp.cumsum(cuts + 1)).astype(jnp.int32)
    return begin, first_slot


def _blocks(name, lengths, batch, seqlen_q, topk) -> jax.Array:
    """Blocks of 64 tokens of every row, i32 [B * Sq]."""
    if lengths is None:
        lengths = jnp.full((batch, 1), topk, jnp.int32)
    else:
        lengths = checks.int32(name, lengths)
        checks.shape(name, lengths, (batch,) if lengths.ndim == 1 else (batch, seqlen_q))
        lengths = lengths[:, None] if lengths.ndim == 1 else lengths
    lengths = jnp.broadcast_to(jnp.clip(lengths, 0, topk), (batch, seqlen_q))
    return (lengths.reshape(-1) + BLOCK - 1) // BLOCK
