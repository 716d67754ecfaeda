"""Portable kernels (sm_80 and later).

One kernel computes the context part, the beam part, or both under one softmax ("fused"). Its
thread blocks are (query tile, KV head, slot): the W*G queries that share a KV head are packed
into the rows of one matrix, so that K and V are read once per KV head; a slot is one chunk of one
sample's context. Slots are dealt to samples by their lengths, so that ragged batches cost no more
than their tokens. With more than one chunk a sample, the parts are merged by a second kernel.
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jax_beam_attn._core.merge_triton import merge_slots
from jax_beam_attn._core.softmax_triton import LN2, LOG2E, advance, load_scale, normalize, soft_cap
from jax_beam_attn._core.triton_call import row_descriptor, triton_call
from jax_beam_attn.beam_decode.plan import resolve_triton


def run(operands, call):
    """Launches the pipeline that the plan names."""
    plan = resolve_triton(operands, call)
    batch, width, heads, _ = operands["q"].shape
    rows = (width, heads)
    if plan.pipeline == "fused":
        slots = plan.slots(batch)
        out, lse, first_slot = _attend(operands, call, plan, slots, context=True, beam=True)
        if plan.num_splits == 1:
            return out, lse
        beam_part = None
    else:
        slots = plan.slots(batch)
        out, lse, first_slot = _attend(operands, call, plan, slots, context=True, beam=False)
        beam_plan = plan.of_beam_part()
        beam_part = _attend(operands, call, beam_plan, batch, context=False, beam=True)[:2]
    return merge_slots(
        out,
        lse,
        batch=batch,
        rows=rows,
        dtype=operands["q"].dtype,
        target=call.target,
        first_slot=first_slot if plan.ragged else None,
        extra=beam_part,
        sink=operands.get("sink"),
    )


def _attend(operands, call, plan, slots, *, context, beam):
    """One launch; returns out, lse and each sample's first slot."""
    static = call.static
    q, topk = operands["q"], operands["topk_indices"]
    batch, width, heads, head_dim = q.shape
    k, v = operands["k_context"], operands["v_context"]
    kv_heads = k.shape[-2]
    group = heads // kv_heads
    paged = "block_tables" in operands
    page_size = k.shape[1] if paged else 1
    page_aligned = paged and page_size % plan.block_n == 0
    pool_rows = k.size // (kv_heads * head_dim)
    final = plan.num_splits == 1 and context and beam
    split = plan.num_splits > 1 and context
    block_d = max(16, triton.next_power_of_2(head_dim))
    context = context and static.capacity > 0 and pool_rows > 0
    use_tma = plan.use_tma and context and block_d == head_dim and (page_aligned or not paged)
    if use_tma:
        k, v = (row_descriptor(array, (plan.block_n, head_dim)) for array in (k, v))
    m_tiles = triton.cdiv(width * group, plan.block_m)
    cu = operands.get("cu_seqlens")

    def stride(name, rank):
        """Elements between samples: 0 for a value that all samples share."""
        array = operands.get(name)
        return array.size // batch if array is not None and array.ndim > rank else 0

    sizes = (
        batch,
        width,
        heads,
        kv_heads,
        group,
        static.capacity,
        pool_rows,
        page_size,
        operands["block_tables"].shape[1] if paged else 0,
        batch // cu.shape[0] if cu is not None else batch,
        operands["k_beam"].shape[1],
        topk.shape[1],
        topk.shape[2],
        plan.chunk,
        plan.num_splits,
        m_tiles,
        stride("decode_nums", 0),
        stride("scale", 0),
        stride("sink", 1),
    )
    floats = (
        float(static.scale if static.scale is not None else 1.0),
        float(static.soft_cap if static.soft_cap is not None else 1.0),
    )
    part = jax.ShapeDtypeStruct((slots, width, heads, head_dim), q.dtype if final else jnp.float32)
    return triton_call(
        attend_kernel,
        [
            q,
            k,
            v,
            operands["k_beam"],
            operands["v_beam"],
            topk,
            operands["decode_nums"],
            operands.get("seqused"),
            cu,
            operands.get("block_tables"),
            operands.get("scale"),
            operands.get("sink") if final else None,
        ],
        (sizes, floats),
        [
            part,
            jax.ShapeDtypeStruct(part.shape[:3], jnp.float32),
            jax.ShapeDtypeStruct((batch + 1,), jnp.int32),
        ],
        grid=(m_tiles * kv_heads * slots,),
        target=call.target,
        cost=call.cost,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        blocks_per_sm=plan.blocks_per_sm,
        HEAD_DIM=head_dim,
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_D=block_d,
        CONTEXT=context,
        BEAM=beam and topk.shape[2] > 0 and operands["k_beam"].shape[1] > 0,
        SPLIT=split,
        RAGGED=plan.ragged,
        PAGED=paged,
        PAGE_ALIGNED=page_aligned,
        USE_TMA=use_tma,
        SOFT_CAP=static.soft_cap is not None,
    )


@triton.jit
def attend_kernel(
    q,
    k_context,
    v_context,
    k_beam,
    v_beam,
    topk_indices,
    decode_nums,
    seqused,
    cu_seqlens,
    block_tables,
    scale,
    sink,
    numbers,
    out,
    lse,
    first_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CONTEXT: tl.constexpr,
    BEAM: tl.constexpr,
    SPLIT: tl.constexpr,
    RAGGED: tl.constexpr,
    PAGED: tl.constexpr,
    PAGE_ALIGNED: tl.constexpr,
    USE_TMA: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """One query tile against one chunk of one sample's context, and a share of its beam steps."""
    sizes = numbers[0]
    batch, width, heads = sizes[0], sizes[1], sizes[2]
    kv_heads, group, capacity = sizes[3], sizes[4], sizes[5]
    pool_rows, page_size, max_pages = sizes[6], sizes[7], sizes[8]
    samples_per_group, beam_rows, index_heads = sizes[9], sizes[10], sizes[11]
    max_steps, chunk, splits_per_sample, m_tiles = sizes[12], sizes[13], sizes[14], sizes[15]
    decode_stride, scale_stride, sink_stride = sizes[16], sizes[17], sizes[18]

    # Query tiles are innermost: blocks that share K and V run at the same time.
    block = tl.program_id(0)
    tile = block % m_tiles
    kv_head = (block // m_tiles) % kv_heads
    slot = block // (m_tiles * kv_heads)

    sample = slot
    split = 0
    splits = 1
    if SPLIT:
        if RAGGED:
            slots = tl.num_programs(0) // (m_tiles * kv_heads)
            sample, split, splits, chunk = _deal_slot(
                slot, slots, block, first_slot, batch, chunk, capacity, pool_rows,
                samples_per_group, seqused, cu_seqlens,
            )  # fmt: skip
            if sample >= batch:
                return
        else:
            sample = slot // splits_per_sample
            split = slot % splits_per_sample
            splits = splits_per_sample

    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    beam = row // group
    head = kv_head * group + row % group
    row_valid = row < width * group
    in_row = (beam * heads + head).to(tl.int64) * HEAD_DIM
    q_rows = q + sample.to(tl.int64) * width * heads * HEAD_DIM + in_row
    inside = row_valid[:, None] & (column < HEAD_DIM)[None, :]

    # Scores q.k are compared as they are and scaled inside the exponent, by `to_log2` > 0.
    softmax_scale = numbers[1][0]
    sign = None
    if scale is not None:
        softmax_scale, sign = load_scale(scale + sample * scale_stride)
    cap = numbers[1][1]
    to_cap = softmax_scale / cap
    to_log2 = softmax_scale * LOG2E
    if SOFT_CAP:
        to_log2 = cap * LOG2E

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    if BEAM:
        # Steps are dealt to the sample's splits in turn, so no split has more than one extra.
        q_tile = tl.load(q_rows[:, None] + column[None, :], mask=inside, other=0.0)
        q_tile = q_tile.to(tl.float32)
        index_head = (head * index_heads) // heads
        index_rows = topk_indices + (
            (sample.to(tl.int64) * index_heads + index_head) * max_steps * width + beam
        )
        beam_base = sample.to(tl.int64) * beam_rows
        steps = tl.minimum(tl.load(decode_nums + sample * decode_stride), max_steps)
        following = _ancestors(index_rows, split, steps, width, row_valid)
        for step in range(split, steps, splits):
            ancestor = following
            following = _ancestors(index_rows, step + splits, steps, width, row_valid)
            found = (ancestor >= 0) & (ancestor < beam_rows)
            at = ((beam_base + ancestor) * kv_heads + kv_head) * HEAD_DIM
            at = at[:, None] + column[None, :]
            present = found[:, None] & (column < HEAD_DIM)[None, :]
            k = tl.load(k_beam + at, mask=present, other=0.0).to(tl.float32)
            v = tl.load(v_beam + at, mask=present, other=0.0).to(tl.float32)
            score = tl.sum(q_tile * k, axis=1)
            if sign is not None:
                score *= sign
            score = soft_cap(score, to_cap, SOFT_CAP)
            score = tl.where(found, score, float("-inf"))
            peak, base, shrink = advance(peak, score, to_log2)
            weight = tl.exp2(score * to_log2 - base)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * v

    if CONTEXT:
        q_tile = tl.load(q_rows[:, None] + column[None, :], mask=inside, other=0.0)
        length, start = _bounds(
            sample, True, capacity, pool_rows, samples_per_group, seqused, cu_seqlens
        )
        low = split * chunk
        high = tl.minimum(length, low + chunk)
        whole = low + tl.maximum(high - low, 0) // BLOCK_N * BLOCK_N
        table = block_tables
        if PAGED:
            table = block_tables + sample.to(tl.int64) * max_pages
        # Only the tile that the length cuts needs masks; pages that are not there need them too.
        for position in tl.range(low, whole, BLOCK_N):
            peak, total, acc = _attend_tile(
                q_tile, peak, total, acc, position, high, start, table, k_context, v_context,
                kv_head, kv_heads, pool_rows, page_size, sign, to_log2, to_cap,
                HEAD_DIM, BLOCK_N, BLOCK_D, PAGED, PAGE_ALIGNED, USE_TMA, SOFT_CAP, False,
            )  # fmt: skip
        if whole < high:
            peak, total, acc = _attend_tile(
                q_tile, peak, total, acc, whole, high, start, table, k_context, v_context,
                kv_head, kv_heads, pool_rows, page_size, sign, to_log2, to_cap,
                HEAD_DIM, BLOCK_N, BLOCK_D, PAGED, PAGE_ALIGNED, USE_TMA, SOFT_CAP, True,
            )  # fmt: skip

    norm, log_total = normalize(
        peak * to_log2 * LN2, total, sink, sample * sink_stride + head, row_valid
    )
    out_rows = out + slot.to(tl.int64) * width * heads * HEAD_DIM + in_row
    result = (acc * norm[:, None]).to(out.dtype.element_ty)
    tl.store(out_rows[:, None] + column[None, :], result, mask=inside)
    lse_rows = lse + slot.to(tl.int64) * width * heads + beam * heads + head
    tl.store(lse_rows, log_total, mask=row_valid)


@triton.jit
def _ancestors(index_rows, step, steps, width, row_valid):
    """Each row's ancestor of a step, -1 where there is none."""
    wanted = tl.where(row_valid, step, steps) < steps
    return tl.load(index_rows + step * width, mask=wanted, other=-1)


@triton.jit
def _attend_tile(
    q_tile, peak, total, acc, position, high, start, table, k_context, v_context,
    kv_head, kv_heads, pool_rows, page_size, sign, to_log2, to_cap,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGED: tl.constexpr,
    PAGE_ALIGNED: tl.constexpr, USE_TMA: tl.constexpr, SOFT_CAP: tl.constexpr,
    MASK: tl.constexpr,
):  # fmt: skip
    """Online softmax over BLOCK_N keys at `position`; with MASK those from `high` on are out."""
    offset = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    in_head = (column < HEAD_DIM)[None, :]
    valid = position + offset < high
    first = start + position
    if PAGE_ALIGNED:
        page = tl.load(table + position // page_size)
        page_valid = (page >= 0) & (page < pool_rows // page_size)
        # A page that is not there is read from behind the pool, where loads give zeros.
        first = tl.where(page_valid, page * page_size + position % page_size, pool_rows)
        valid = position + offset < tl.where(page_valid, high, 0)
    elif PAGED:
        page = tl.load(table + (position + offset) // page_size, mask=valid, other=-1)
        valid &= (page >= 0) & (page < pool_rows // page_size)

    if USE_TMA:
        k = k_context.load([first, kv_head * HEAD_DIM])
        v = v_context.load([first, kv_head * HEAD_DIM])
        if MASK:
            # A masked row of V may be NaN, and 0 * NaN is NaN.
            v = tl.where(valid[:, None], v, 0.0)
    else:
        row = tl.cast(first, tl.int64) + offset
        if PAGED and not PAGE_ALIGNED:
            row = page.to(tl.int64) * page_size + (position + offset) % page_size
        at = (row * kv_heads + kv_head)[:, None] * HEAD_DIM + column[None, :]
        if MASK or PAGED:
            k = tl.load(k_context + at, mask=valid[:, None] & in_head, other=0.0)
            v = tl.load(v_context + at, mask=valid[:, None] & in_head, other=0.0)
        elif HEAD_DIM == BLOCK_D:
            k = tl.load(k_context + at)
            v = tl.load(v_context + at)
        else:
            k = tl.load(k_context + at, mask=in_head, other=0.0)
            v = tl.load(v_context + at, mask=in_head, other=0.0)

    score = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
    if sign is not None:
        score *= sign
    score = soft_cap(score, to_cap, SOFT_CAP)
    if MASK or PAGED:
        score = tl.where(valid[None, :], score, float("-inf"))
    peak, base, shrink = advance(peak, tl.max(score, axis=1), to_log2)
    weight = tl.exp2(score * to_log2 - base[:, None])
    total = total * shrink + tl.sum(weight, axis=1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc, input_precision="ieee")
    return peak, total, acc


@triton.jit
def _bounds(sample, mask, capacity, pool_rows, samples_per_group, seqused, cu_seqlens):
    """A sample's length and its first row in the pool; samples may be a vector."""
    length = sample * 0 + capacity
    start = sample * capacity
    if cu_seqlens is not None:
        at = cu_seqlens + sample + sample // samples_per_group
        start = tl.minimum(tl.maximum(tl.load(at, mask=mask, other=0), 0), pool_rows)
        end = tl.minimum(tl.maximum(tl.load(at + 1, mask=mask, other=0), 0), pool_rows)
        length = tl.minimum(length, end - start)
    if seqused is not None:
        length = tl.minimum(length, tl.load(seqused + sample, mask=mask, other=0))
    return tl.maximum(length, 0), start


@triton.jit
def _deal_slot(
    slot, slots, block, first_slot, batch, chunk, capacity, pool_rows, samples_per_group, seqused,
    cu_seqlens,
):  # fmt: skip
    """The sample, split, number of splits and chunk of a slot, dealt by the samples' lengths.

    Each sample has one slot per chunk of its length, and at least one, for its beam part. The
    first block also writes each sample's first slot for the merge. Bounds that are out of order
    can name more tokens than there are, and so need more slots than there are: then each sample
    has one.
    """
    SCAN: tl.constexpr = 128
    sample = batch * 0
    split = slot
    splits = batch * 0 + 1
    dealt = batch * 0
    for start in range(0, batch, SCAN):
        index = start + tl.arange(0, SCAN)
        exists = index < batch
        length, _ = _bounds(
            index, exists, capacity, pool_rows, samples_per_group, seqused, cu_seqlens
        )
        count = tl.where(exists, tl.maximum((length + chunk - 1) // chunk, 1), 0)
        end = dealt + tl.cumsum(count, axis=0)
        if block == 0:
            tl.store(first_slot + index + 1, end, mask=exists)
        sample += tl.sum((exists & (end <= slot)).to(tl.int32), axis=0)
        here = exists & (end > slot) & (end - count <= slot)
        split -= tl.sum(tl.where(here, end - count, 0), axis=0)
        splits += tl.sum(tl.where(here, count - 1, 0), axis=0)
        dealt += tl.sum(count, axis=0)
    if block == 0:
        tl.store(first_slot, 0)
    too_many = dealt > slots
    if too_many & (block == 0):
        tl.debug_barrier()  # other threads may have stored the same entries above
        for start in range(0, batch + 1, SCAN):
            index = start + tl.arange(0, SCAN)
            tl.store(first_slot + index, index, mask=index <= batch)
    return (
        tl.where(too_many, slot, sample),
        tl.where(too_many, 0, split),
        tl.where(too_many, 1, splits),
        tl.where(too_many, capacity, chunk),
    )
