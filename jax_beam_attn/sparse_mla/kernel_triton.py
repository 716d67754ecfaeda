"""Portable kernels (sm_80 and later).

A thread block takes a tile of heads and one part of the work: the blocks of 64 listed tokens that
the schedule (or, with a plan's `num_splits`, an equal cut of every row) gives it. Tokens of both
caches form one sequence, main cache first, so that one loop serves both. Each tile of tokens is
gathered and dequantised once, `WIDTH` dimensions at a time: more of them mean fewer barriers and
more registers. It is the key of QK and, its first 512 dimensions, the value of PV. Parts are merged
by a second kernel.
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
from jax_beam_attn._core.softmax_triton import LN2, LOG2E, advance, load_scale, normalize
from jax_beam_attn._core.triton_call import triton_call
from jax_beam_attn.sparse_mla.cache import VALUE_DIM
from jax_beam_attn.sparse_mla.plan import SCHEDULED, resolve_triton
from jax_beam_attn.sparse_mla.schedule import BLOCK, mla_schedule


def run(operands, call):
    """Attends part by part, then merges the parts of each row."""
    plan = resolve_triton(operands, call)
    q = operands["q"]
    batch, seqlen_q, heads, _ = q.shape
    rows = batch * seqlen_q
    begin = first_slot = None
    slots = rows * plan.num_splits
    if plan.num_splits == SCHEDULED:
        begin, first_slot = _schedule(operands, plan)
        slots = rows + begin.shape[0]
    out, lse = _attend(operands, call, plan, begin, slots)
    if plan.num_splits != 1:
        sink = operands.get("sink")
        if sink is not None and sink.ndim == 2:
            sink = jnp.repeat(sink, seqlen_q, axis=0)
        out, lse = merge_slots(
            out,
            lse,
            batch=rows,
            rows=(1, heads),
            dtype=q.dtype,
            target=call.target,
            first_slot=first_slot,
            sink=sink,
        )
    return out.reshape(batch, seqlen_q, heads, VALUE_DIM), lse.reshape(batch, seqlen_q, heads)


def _schedule(operands, plan):
    """The caller's schedule, or one for this call's lengths."""
    if "begin" in operands:
        return operands["begin"], operands["first_slot"]
    batch, seqlen_q, heads, _ = operands["q"].shape
    made = mla_schedule(
        operands.get("topk_length"),
        batch=batch,
        seqlen_q=seqlen_q,
        num_heads=heads,
        topk=operands["indices"].shape[2],
        extra_topk=operands["extra_indices"].shape[2] if "extra_indices" in operands else 0,
        extra_topk_length=operands.get("extra_topk_length"),
        num_parts=plan.num_parts,
    )
    return made.begin, made.first_slot


def _attend(operands, call, plan, begin, slots):
    """One launch; returns partial results, or final ones where no row is split."""
    static, q = call.static, operands["q"]
    batch, seqlen_q, heads, head_dim = q.shape
    rows = batch * seqlen_q
    final = plan.num_splits == 1
    parts = begin.shape[0] - 1 if begin is not None else rows * plan.num_splits
    head_tiles = triton.cdiv(heads, plan.block_h)

    def stride(name, rank):
        """Elements between samples: 0 for a value that all samples share."""
        array = operands.get(name)
        return array.size // batch if array is not None and array.ndim > rank else 0

    caches = [
        _cache_sizes(operands, prefix, page_size)
        for prefix, page_size in (("", static.page_size), ("extra_", static.extra_page_size))
    ]
    blocks = sum(triton.cdiv(topk, BLOCK) for topk, *_ in caches)
    sizes = (
        rows,
        seqlen_q,
        heads,
        head_tiles,
        max(plan.num_splits, 1),
        triton.cdiv(blocks, max(plan.num_splits, 1)),
        stride("scale", 0),
        stride("sink", 1),
    )
    given = [operands[name] for name in ("cache", "extra_cache") if name in operands]
    aligned = 16 if all(_block_bytes(cache) % 16 == 0 for cache in given) else 8
    return triton_call(
        attend_kernel,
        [
            q,
            operands["cache"],
            operands["indices"],
            operands.get("topk_length"),
            operands.get("extra_cache"),
            operands.get("extra_indices"),
            operands.get("extra_topk_length"),
            begin,
            operands.get("scale"),
            operands.get("sink") if final else None,
        ],
        (
            sizes,
            (float(static.scale if static.scale is not None else 1.0),),
            *caches,
        ),
        [
            jax.ShapeDtypeStruct((slots, 1, heads, VALUE_DIM), q.dtype if final else jnp.float32),
            jax.ShapeDtypeStruct((slots, 1, heads), jnp.float32),
        ],
        grid=(parts * head_tiles,),
        target=call.target,
        cost=call.cost,
        num_warps=plan.num_warps,
        # Triton counts stages of work: of a tile in flight the slots and then the keys are loaded.
        num_stages=2 * plan.num_stages + 1,
        blocks_per_sm=plan.blocks_per_sm,
        FORMAT=static.format,
        HEAD_DIM=head_dim,
        ALIGNED=aligned,
        NATIVE_E4M3=call.target.compute_capability >= 89,
        BLOCK_H=plan.block_h,
        BLOCK_N=plan.block_n,
        WIDTH=plan.width,
    )


def _cache_sizes(operands, prefix, page_size):
    """What the kernel needs to know of a cache: run-time numbers, all 0 without one."""
    cache, length = operands.get(f"{prefix}cache"), operands.get(f"{prefix}topk_length")
    if cache is None:
        return (0, 1, 0, 0, 0, 0, 0)
    _, seqlen_q, topk = operands[f"{prefix}indices"].shape
    # slot // page_size = (2 * slot * reciprocal >> 32) >> shift for every slot below 2**31. The
    # reciprocal is in [2**31, 2**32); the number passed is 2**32 less, to fit into int32.
    shift = max(page_size - 1, 0).bit_length()
    reciprocal = -(-(2 ** (31 + shift)) // max(page_size, 1))
    return (
        topk,
        seqlen_q if length is not None and length.ndim == 1 else 1,  # rows that share a length
        cache.shape[0] * page_size,
        page_size,
        reciprocal - 2**32,
        shift,
        _block_bytes(cache) // 8,  # which may not fit into int32
    )


def _block_bytes(cache):
    """A multiple of 8 in every format."""
    return cache.size * cache.dtype.itemsize // max(cache.shape[0], 1)


@triton.jit
def attend_kernel(
    q,
    cache,
    indices,
    topk_length,
    extra_cache,
    extra_indices,
    extra_topk_length,
    begin,
    scale,
    sink,
    numbers,
    out,
    lse,
    FORMAT: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of heads against one part's tokens, row by row."""
    sizes = numbers[0]
    rows, seqlen_q, heads, head_tiles = sizes[0], sizes[1], sizes[2], sizes[3]
    num_splits, blocks_per_split = sizes[4], sizes[5]
    scale_stride, sink_stride = sizes[6], sizes[7]
    main, extra = numbers[2], numbers[3]
    VALUE: tl.constexpr = 512
    ROPE: tl.constexpr = 64
    BLOCK: tl.constexpr = 64

    # Head tiles are innermost: blocks that gather the same tokens run at the same time.
    block = tl.program_id(0)
    head = (block % head_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
    part = block // head_tiles
    if begin is not None:
        # A row has one slot, and one more for each cut inside it.
        first_row = tl.load(begin + 2 * part)
        first_block = tl.load(begin + 2 * part + 1)
        last_row = tl.load(begin + 2 * part + 2)
        end_block = tl.load(begin + 2 * part + 3)
        cuts = _cuts(begin, part)
        first_row = tl.minimum(tl.maximum(first_row, 0), rows)
        end_row = tl.minimum(last_row + (end_block > 0).to(tl.int32), rows)
    else:
        first_row = part // num_splits
        first_block = part % num_splits * blocks_per_split
        last_row = first_row
        end_block = first_block + blocks_per_split
        cuts = part - first_row
        end_row = first_row + 1

    PARTS: tl.constexpr = VALUE // WIDTH
    dim = tl.arange(0, WIDTH)
    rope_dim = tl.arange(0, ROPE)
    head_valid = head < heads
    for row in range(first_row, end_row):
        sample = row // seqlen_q
        length = _length(topk_length, main, row)
        extra_length = _length(extra_topk_length, extra, row)
        # Blocks of 64 do not mix caches: the extra one's begin behind the main one's.
        extra_start = (length + BLOCK - 1) // BLOCK
        total_blocks = extra_start + (extra_length + BLOCK - 1) // BLOCK
        low = tl.where(row == first_row, first_block, 0)
        high = tl.where(row == last_row, tl.minimum(end_block, total_blocks), total_blocks)

        # Scores q.k are compared as they are and scaled inside the exponent, by `to_log2` > 0.
        softmax_scale = numbers[1][0]
        sign = None
        if scale is not None:
            softmax_scale, sign = load_scale(scale + sample * scale_stride)
        to_log2 = softmax_scale * LOG2E
        q_rows = q + (tl.cast(row, tl.int64) * heads + head)[:, None] * HEAD_DIM
        inside = head_valid[:, None]
        q_parts = ()
        for g in tl.static_range(PARTS):
            of_part = q_rows + (g * WIDTH + dim)[None, :]
            q_parts += (tl.load(of_part, mask=inside, other=0.0),)
        if HEAD_DIM > VALUE:
            q_rope = tl.load(q_rows + (VALUE + rope_dim)[None, :], mask=inside, other=0.0)

        peak = tl.full((BLOCK_H,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_H,), tl.float32)
        accs = ()
        for _ in tl.static_range(PARTS):
            accs += (tl.zeros((BLOCK_H, WIDTH), tl.float32),)
        listed = indices + tl.cast(row, tl.int64) * main[0]
        if extra_cache is not None:
            extra_listed = extra_indices + tl.cast(row, tl.int64) * extra[0]

        for position in tl.range(low * BLOCK, high * BLOCK, BLOCK_N):
            entry = position + tl.arange(0, BLOCK_N)
            if extra_cache is None:
                slot = tl.load(listed + entry, mask=entry < length, other=-1)
                base = cache
                here = main
            else:
                in_extra = position >= extra_start * BLOCK
                entry -= tl.where(in_extra, extra_start * BLOCK, 0)
                of_cache = tl.where(in_extra, extra_listed, listed)
                limit = tl.where(in_extra, extra_length, length)
                slot = tl.load(of_cache + entry, mask=entry < limit, other=-1)
                base = tl.where(in_extra, extra_cache, cache)
                here = _either(in_extra, extra, main)
            listed_slot = slot.to(tl.uint32)  # a negative one is past every cache
            valid = listed_slot < tl.cast(here[2], tl.uint32)
            page = tl.umulhi(2 * listed_slot, tl.cast(here[4], tl.uint32))
            page = (page >> tl.cast(here[5], tl.uint32)).to(tl.int32)
            offset = slot - page * here[3]
            row_at, scale_at = _places(
                base, page, offset, here[3], here[6], FORMAT, HEAD_DIM, ALIGNED
            )
            score = tl.zeros((BLOCK_H, BLOCK_N), tl.float32)
            if HEAD_DIM > VALUE:
                rope = _load_rope(row_at, valid, q_rope, FORMAT)
                score = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            keys = ()
            for g in tl.static_range(PARTS):
                key = _load_key(row_at, scale_at, valid, q_parts[0], g, WIDTH, FORMAT, NATIVE_E4M3)
                score = tl.dot(q_parts[g], tl.trans(key), score, input_precision="ieee")
                keys += (key,)
            if sign is not None:
                score *= sign
            score = tl.where(valid[None, :], score, float("-inf"))
            peak, base, shrink = advance(peak, tl.max(score, axis=1), to_log2)
            weight = tl.exp2(score * to_log2 - base[:, None])
            total = total * shrink + tl.sum(weight, axis=1)
            weight = weight.to(q_parts[0].dtype)
            new_accs = ()
            for g in tl.static_range(PARTS):
                acc = accs[g] * shrink[:, None]
                new_accs += (tl.dot(weight, keys[g], acc, input_precision="ieee"),)
            accs = new_accs

        norm, log_total = normalize(
            peak * to_log2 * LN2, total, sink, sample * sink_stride + head, head_valid
        )
        at = tl.cast(cuts + row, tl.int64) * heads + head
        out_at = out + at[:, None] * VALUE + dim[None, :]
        for g in tl.static_range(PARTS):
            result = (accs[g] * norm[:, None]).to(out.dtype.element_ty)
            tl.store(out_at + g * WIDTH, result, mask=inside)
        tl.store(lse + at, log_total, mask=head_valid)


@triton.jit
def _cuts(begin, part):
    """How many of the parts up to this one begin inside a row."""
    SCAN: tl.constexpr = 512
    cuts = part * 0
    for start in range(0, part + 1, SCAN):
        index = start + tl.arange(0, SCAN)
        block = tl.load(begin + 2 * index + 1, mask=index <= part, other=0)
        cuts += tl.sum((block > 0).to(tl.int32), axis=0)
    return cuts


@triton.jit
def _length(lengths, sizes, row):
    """How many of a row's listed tokens count."""
    length = row * 0 + sizes[0]
    if lengths is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths + row // sizes[1]), 0), length)
    return length


@triton.jit
def _either(condition, yes, no):
    """One of two tuples of a cache's sizes."""
    return (
        0,
        0,
        tl.where(condition, yes[2], no[2]),
        tl.where(condition, yes[3], no[3]),
        tl.where(condition, yes[4], no[4]),
        tl.where(condition, yes[5], no[5]),
        tl.where(condition, yes[6], no[6]),
    )


@triton.jit
def _places(
    base, page, offset, page_size, block_words,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Where tokens begin, and their scales."""
    block = page.to(tl.int64) * block_words * 8
    offset = offset.to(tl.int64)
    if FORMAT == "bf16":
        row = base + tl.multiple_of(block // 2 + offset * HEAD_DIM, 64)
        scale = row
    elif FORMAT == "v32":
        row = base + tl.multiple_of(block + offset * 656, ALIGNED)
        scale = row + 512
    else:
        row = base + tl.multiple_of(block + offset * 576, ALIGNED)
        scale = base + tl.multiple_of(block + tl.cast(page_size, tl.int64) * 576 + offset * 8, 8)
    return row, scale


@triton.jit
def _load_key(
    row, scale, valid, like,
    G: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
):  # fmt: skip
    """Dimensions G * WIDTH to (G + 1) * WIDTH of keys [N, WIDTH]; 0 where invalid."""
    if FORMAT == "bf16":
        at = row[:, None] + (G * WIDTH + tl.arange(0, WIDTH))[None, :]
        key = tl.load(at, mask=valid[:, None], other=0.0).to(like.dtype)
    else:
        key = _dequantize(row, scale, valid, like, G, WIDTH, FORMAT, NATIVE_E4M3)
    return key


@triton.jit
def _dequantize(
    row, scale, valid, like,
    G: tl.constexpr, WIDTH: tl.constexpr, FORMAT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
):  # fmt: skip
    """Those dimensions of FP8 keys."""
    dim = G * WIDTH + tl.arange(0, WIDTH)
    HAS_ROPE: tl.constexpr = FORMAT == "model1" and (G + 1) * WIDTH > 448
    # A scale is for so many dimensions, and so many scales are here.
    SPAN: tl.constexpr = 128 if FORMAT == "v32" else 64
    SCALES: tl.constexpr = WIDTH // SPAN
    group = G * SCALES + tl.arange(0, SCALES)
    quantized = valid[:, None]
    if HAS_ROPE:
        quantized = quantized & (dim < 448)[None, :]
    codes = tl.load(row[:, None] + dim[None, :], mask=quantized, other=0)
    if FORMAT == "v32":
        scales = scale.to(tl.pointer_type(tl.float32))
        factor = tl.load(scales[:, None] + group[None, :], mask=valid[:, None], other=0.0)
    else:
        # All eight at a time: few bytes cannot be copied asynchronously.
        word = tl.load(scale.to(tl.pointer_type(tl.uint64)), mask=valid, other=0)
        factor = _e8m0(((word[:, None] >> (8 * group)[None, :]) & 0xFF).to(tl.uint32))
    tokens: tl.constexpr = valid.shape[0]
    key = _e4m3(codes, NATIVE_E4M3).reshape(tokens, SCALES, SPAN) * factor[:, :, None]
    if HAS_ROPE:
        rope = _load_rope(row, valid, like, FORMAT).to(tl.float32)
        key = tl.where((group == 7)[None, :, None], rope[:, None, :], key)
    return key.to(like.dtype).reshape(tokens, WIDTH)


@triton.jit
def _load_rope(row, valid, like, FORMAT: tl.constexpr):
    """The rope of keys [N, 64]; 0 where invalid."""
    if FORMAT == "bf16":
        first = row + 512
    elif FORMAT == "v32":
        first = (row + 528).to(tl.pointer_type(tl.bfloat16))
    else:
        first = (row + 448).to(tl.pointer_type(tl.bfloat16))
    at = first[:, None] + tl.arange(0, 64)[None, :]
    rope = tl.load(at, mask=valid[:, None], other=0.0)
    if FORMAT == "v32":
        # Not used where it arrives, it needs no further buffer: 512 bytes decide on a tile of 64.
        rope = _fixed(rope)
    return rope.to(like.dtype)


@triton.jit
def _fixed(loaded):
    """What was loaded, as an operation that Triton may not move anything past.

    It would change the layout of keys for each of the two products before they are dequantised,
    and then could not copy them ahead of time.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [loaded],
        loaded.dtype,
        False,
        32 // loaded.dtype.primitive_bitwidth,
    )


@triton.jit
def _e4m3(codes, NATIVE: tl.constexpr):
    """float32 of e4m3 bytes."""
    codes = _fixed(codes)
    if NATIVE:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    # The seven low bits in front of float32's mantissa, the sign on top: the number times 2**-120,
    # subnormals included.
    bits = codes.to(tl.uint32)
    magnitude = bits & 0x7F
    scaled = ((magnitude << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where(magnitude == 0x7F, float("nan"), scaled * 1.329227995784916e36)


@triton.jit
def _e8m0(exponent):
    """float32 of e8m0 numbers: 2**(exponent - 127), NaN for 255."""
    bits = tl.where(exponent == 0, 0x400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)
