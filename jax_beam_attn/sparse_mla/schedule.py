"""Which part of the work each thread block takes, made on the device from the lengths.

A row is one query token of one sample; its work is its listed tokens in blocks of 64, main cache
first. Laid end to end, with a fixed overhead in front of each row, all rows form a line that is
cut into `num_parts` pieces of equal length. Part p covers everything from its beginning to the
beginning of part p + 1, so a row that is longer than it was when the schedule was made loses
nothing: its last part takes the rest.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn._core import checks, folding, native
from jax_beam_attn._core.handler import Handler
from jax_beam_attn._core.operator import Operator, Output

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

    static = ScheduleStatic(batch, seqlen_q, topk, extra_topk, num_parts)
    _check_cost(static)
    lengths = {
        name: _lengths(name, value, batch, seqlen_q)
        for name, value in (
            ("topk_length", topk_length),
            ("extra_topk_length", extra_topk_length),
        )
        if value is not None
    }
    if lengths:
        begin, first_slot = (array.squeeze(0) for array in schedule(lengths, static))
    else:  # XLA does not fold the search within `_cut`, so a constant is made while tracing
        with jax.ensure_compile_time_eval():
            begin, first_slot = _schedule({}, static)
    return MlaSchedule(begin, first_slot, batch, seqlen_q, num_heads, topk, extra_topk)


@dataclasses.dataclass(frozen=True)
class ScheduleStatic:
    """Static arguments of `mla_schedule`, as there."""

    batch: int
    seqlen_q: int
    topk: int
    extra_topk: int
    num_parts: int


def _check_cost(static: ScheduleStatic) -> None:
    """Requires that every position on the line of all rows is an int32."""
    row = sum(-(-topk // BLOCK) for topk in (static.topk, static.extra_topk)) + OVERHEAD
    rows = static.batch * static.seqlen_q
    if max(rows, 1) * row + static.num_parts > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"topk: got {static.topk} with extra_topk = {static.extra_topk} for {rows} rows in "
            f"{static.num_parts} parts, expected less than 2**31 blocks of {BLOCK} tokens in all"
        )


def _lengths(name, lengths, batch, seqlen_q) -> jax.Array:
    """Lengths as i32 [1, B] or [1, B, Sq]: those of one problem."""
    lengths = checks.int32(name, lengths)
    checks.shape(name, lengths, (batch,) if lengths.ndim == 1 else (batch, seqlen_q))
    return lengths[None]


def _schedule(lengths, static: ScheduleStatic) -> tuple[jax.Array, jax.Array]:
    """The schedule of one problem; its lengths have no leading axis."""
    blocks = _blocks(lengths.get("topk_length"), static, static.topk)
    blocks += _blocks(lengths.get("extra_topk_length"), static, static.extra_topk)
    return _cut(blocks, static.num_parts)


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


def _blocks(lengths, static: ScheduleStatic, topk: int) -> jax.Array:
    """Blocks of 64 tokens of every row, i32 [B * Sq]."""
    if lengths is None:
        lengths = jnp.full(static.batch, topk, jnp.int32)
    lengths = lengths[:, None] if lengths.ndim == 1 else lengths
    lengths = jnp.broadcast_to(jnp.clip(lengths, 0, topk), (static.batch, static.seqlen_q))
    return (lengths.reshape(-1) - 1) // BLOCK + 1


def _outputs(operands, static: ScheduleStatic):
    problems = next(iter(operands.values())).shape[0]
    rows = static.batch * static.seqlen_q
    return (
        Output((problems, static.num_parts + 1, 2), jnp.int32),
        Output((problems, rows + 1), jnp.int32),
    )


def _schedule_native(operands, static: ScheduleStatic) -> tuple[jax.Array, ...]:
    results = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in _outputs(operands, static)]
    problems = results[0].shape[0]

    def flat(name):
        """Lengths of all problems in one form; without elements where there are none."""
        if name not in operands:
            return jnp.zeros((problems, 0), jnp.int32)
        return operands[name].reshape(problems, math.prod(operands[name].shape[1:]))

    call = jax.ffi.ffi_call(native.MLA_SCHEDULE, results)
    return tuple(
        call(
            flat("topk_length"),
            flat("extra_topk_length"),
            seqlen_q=np.int64(static.seqlen_q),
            topk=np.int64(static.topk),
            extra_topk=np.int64(static.extra_topk),
        )
    )


# Operands: the lengths i32 [G, B] or [G, B, Sq] of G problems, at least one of the two. Each
# problem has a schedule of its own: vmap adds problems, not rows.
schedule = Operator(
    "mla_schedule",
    reference=lambda operands, static: jax.vmap(lambda each: _schedule(each, static))(operands),
    outputs=_outputs,
    fold=lambda size, operands, mapped, static: (
        {name: folding.batched(each, name in mapped, size) for name, each in operands.items()},
        static,
    ),
    empty=lambda operands, static: False,
    cost=lambda operands, static: {"flops": 0, "bytes_accessed": 0},
    instead="nothing: a schedule has no derivative",
    handler=Handler(native.MLA_SCHEDULE, _schedule_native),
)
