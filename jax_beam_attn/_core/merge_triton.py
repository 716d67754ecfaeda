"""Merging partial attention results on the GPU, for all operators.

The same mathematics as `merge.py`. Parts lie in slots; sample b owns the slots from
first_slot[b] to first_slot[b + 1], or an equal number each.
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jax_beam_attn._core.softmax_triton import normalize
from jax_beam_attn._core.target import GpuTarget
from jax_beam_attn._core.triton_call import triton_call

_BLOCK_ROWS = 4


def merge_slots(
    out: jax.Array,
    lse: jax.Array,
    *,
    batch: int,
    rows: tuple[int, int],
    dtype: jnp.dtype,
    target: GpuTarget,
    first_slot: jax.Array | None = None,
    extra: Sequence[jax.Array] | None = None,
    sink: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Merges each sample's slots.

    Args:
        out: f32 [slots, *rows, D], partial outputs.
        lse: f32 [slots, *rows], natural logarithm; -inf marks an empty part.
        batch: Samples.
        rows: Queries of a sample: (positions or beams, heads).
        dtype: Of the result.
        target: The GPU to compile for.
        first_slot: i32 [batch + 1]; None where every sample has slots / batch of them.
        extra: One more part for every sample, f32 [batch, *rows, D] and [batch, *rows].
        sink: f32 [heads] or [batch, heads].

    Returns:
        [batch, *rows, D] in `dtype` and f32 [batch, *rows].
    """
    head_dim = out.shape[-1]
    num_rows = rows[0] * rows[1]
    row_blocks = triton.cdiv(num_rows, _BLOCK_ROWS)
    sink_stride = rows[1] if sink is not None and sink.ndim == 2 else 0
    return triton_call(
        merge_kernel,
        [out, lse, first_slot, *(extra or (None, None)), sink],
        (num_rows, rows[1], out.shape[0] // batch, row_blocks, sink_stride),
        [
            jax.ShapeDtypeStruct((batch, *rows, head_dim), dtype),
            jax.ShapeDtypeStruct((batch, *rows), jnp.float32),
        ],
        grid=(batch * row_blocks,),
        target=target,
        num_warps=4,
        HEAD_DIM=head_dim,
        BLOCK_ROWS=_BLOCK_ROWS,
        BLOCK_D=triton.next_power_of_2(head_dim),
    )


@triton.jit
def merge_kernel(
    parts,
    part_lse,
    first_slot,
    extra,
    extra_lse,
    sink,
    sizes,
    out,
    lse,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A few rows of one sample: online softmax over its parts."""
    num_rows, heads, slots_per_sample = sizes[0], sizes[1], sizes[2]
    row_blocks, sink_stride = sizes[3], sizes[4]
    sample = tl.program_id(0) // row_blocks
    row = (tl.program_id(0) % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    valid = row < num_rows
    inside = valid[:, None] & (column < HEAD_DIM)[None, :]
    at = row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]

    first = sample * slots_per_sample
    end = first + slots_per_sample
    if first_slot is not None:
        first = tl.load(first_slot + sample)
        end = tl.load(first_slot + sample + 1)

    peak = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    own = sample.to(tl.int64) * num_rows
    if extra is not None:
        peak = tl.load(extra_lse + own + row, mask=valid, other=float("-inf"))
        found = peak != float("-inf")
        total = tl.where(found, 1.0, 0.0)
        acc = tl.load(extra + own * HEAD_DIM + at, mask=inside & found[:, None], other=0.0)
    for slot in tl.range(first, end, num_stages=4):
        base = tl.cast(slot, tl.int64) * num_rows
        part_peak = tl.load(part_lse + base + row, mask=valid, other=float("-inf"))
        # An empty part may hold anything; zeros stand for it.
        found = part_peak != float("-inf")
        part = tl.load(parts + base * HEAD_DIM + at, mask=inside, other=0.0)
        part = tl.where(found[:, None], part, 0.0)
        new_peak = tl.maximum(peak, part_peak)
        centre = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp(peak - centre)
        weight = tl.exp(part_peak - centre)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + part * weight[:, None]
        peak = new_peak

    norm, log_total = normalize(peak, total, sink, sample * sink_stride + row % heads, valid)
    result = (acc * norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + own * HEAD_DIM + at, result, mask=inside)
    tl.store(lse + own + row, log_total, mask=valid)
