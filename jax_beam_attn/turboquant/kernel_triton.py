"""Portable kernels (sm_80 and later).

A thread block is (query tile, KV head, split): the tokens of one request and the G query heads
that share a KV head are packed into the rows of one matrix, so that the cache is read once per KV
head. With more than one split, the parts are merged by a second kernel.

What is done per cached element is the cost of this operator, so as much as possible is not:

- Queries are rotated once, instead of keys back.
- A key's norm multiplies its score, and a value's scale its weight:
  sum_t p_t (s_t c_t + z_t) = sum_t (p_t s_t) (c_t - m) + sum_t p_t (z_t + s_t m)
  with m the middle code, so that what is rounded (p s) meets small numbers.
- Keys are fp16, which holds normalised centroids and queries eight times more exactly than bf16:
  both are divided by their largest, and the factors go into the softmax scale.

Where many queries meet each token, all are dequantised once before (`dequantize_triton.py`).
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jax_beam_attn._core import folding
from jax_beam_attn._core.merge_triton import merge_slots
from jax_beam_attn._core.softmax_triton import LN2, LOG2E, advance, load_scale, normalize, soft_cap
from jax_beam_attn._core.triton_call import triton_call
from jax_beam_attn.turboquant import tiles_triton, unpack_triton
from jax_beam_attn.turboquant.dequantize_triton import (
    VALUE_UNIT,
    dequantize_requests,
    format_constants,
)
from jax_beam_attn.turboquant.plan import resolve_triton


def run(operands, call):
    """Launches the attention kernel, what prepares its input, and the merge if there are splits."""
    plan, static, format = resolve_triton(operands, call), call.static, call.static.format
    q, table = operands["q"], operands["block_table"]
    tokens, heads, head_dim = q.shape
    requests = operands["seq_lens"].shape[0]
    group = heads // format.num_kv_heads
    bounds = operands.get("query_start")
    rotation = operands.get("rotation")
    exact, largest = q.dtype == jnp.float32, None
    if plan.rotation == "separate":
        q, rotation = _rotate(q, rotation), None
        if not exact:
            largest = jnp.max(jnp.abs(q), axis=-1)
            largest = jnp.where(largest == 0, 1, largest)
            q = (q / largest[..., None]).astype(jnp.float16)
    dense = dequantize_requests(operands, call, plan) if plan.dequantize else (None, None)
    final = plan.num_splits == 1

    def requests_per_group(name):
        array = operands.get(name)
        return requests // array.shape[0] if array is not None else 1

    sizes = (
        tokens,
        heads,
        format.num_kv_heads,
        group,
        table.shape[1],
        operands["cache"].shape[0],
        plan.block_q,
        plan.tiles,
        plan.chunk,
        plan.num_splits,
        bounds.size if bounds is not None else 0,
        bounds.shape[1] if bounds is not None else 1,
        static.window or 0,
        requests_per_group("rotation"),
        requests_per_group("centroids"),
        requests_per_group("scale"),
        requests_per_group("sink"),
    )
    floats = (
        float(static.scale if static.scale is not None else 1.0),
        float(static.soft_cap if static.soft_cap is not None else 1.0),
    )
    out, lse = triton_call(
        attend_kernel,
        [
            q,
            largest,
            operands["cache"],
            table,
            operands["seq_lens"],
            bounds,
            rotation,
            operands.get("centroids"),
            operands.get("scale"),
            operands.get("sink") if final else None,
            *dense,
        ],
        (sizes, floats),
        [
            jax.ShapeDtypeStruct(
                (tokens * plan.num_splits, heads, head_dim),
                operands["q"].dtype if final else jnp.float32,
            ),
            jax.ShapeDtypeStruct((tokens * plan.num_splits, heads), jnp.float32),
        ],
        grid=(plan.tiles * format.num_kv_heads * plan.num_splits,),
        target=call.target,
        cost=call.cost,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        blocks_per_sm=plan.blocks_per_sm,
        HEAD_DIM=head_dim,
        **format_constants(format),
        BLOCK_M=plan.block_m,
        BLOCK_N=plan.block_n,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        DENSE=plan.dequantize,
        SWAPPED=plan.swapped,
        PACKED=plan.packed,
        EXACT=exact,
        WINDOW=static.window is not None,
        SOFT_CAP=static.soft_cap is not None,
    )
    if final:
        return out, lse
    sink = operands.get("sink")
    if sink is not None:
        sink = sink[0] if sink.shape[0] == 1 else folding.of_each(sink, tokens)
    out, lse = merge_slots(
        out[:, None],
        lse[:, None],
        batch=tokens,
        rows=(1, heads),
        dtype=operands["q"].dtype,
        target=call.target,
        sink=sink,
    )
    return out[:, 0], lse[:, 0]


def _rotate(q, rotation):
    """Rotated queries in float32; without a rotation as they are."""
    q = q.astype(jnp.float32)
    if rotation is None:
        return q
    parts = q.reshape(rotation.shape[0], -1, *q.shape[1:])
    return jnp.einsum("rthi,rji->rthj", parts, rotation, precision="highest").reshape(q.shape)


@triton.jit
def attend_kernel(
    q,
    q_largest,
    cache,
    block_table,
    seq_lens,
    query_start,
    rotation,
    centroids,
    scale,
    sink,
    dense_keys,
    dense_values,
    numbers,
    out,
    lse,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    DATA_ALIGN: tl.constexpr,
    METADATA_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    DENSE: tl.constexpr,
    SWAPPED: tl.constexpr,
    PACKED: tl.constexpr,
    EXACT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """One query tile against one split of its request's cached tokens."""
    sizes = numbers[0]
    tokens, heads, kv_heads, group = sizes[0], sizes[1], sizes[2], sizes[3]
    max_blocks, num_blocks = sizes[4], sizes[5]
    block_q, tiles, chunk, num_splits = sizes[6], sizes[7], sizes[8], sizes[9]
    num_bounds, bounds_per_group, window = sizes[10], sizes[11], sizes[12]
    rotation_requests, centroids_requests = sizes[13], sizes[14]
    scale_requests, sink_requests = sizes[15], sizes[16]
    KEY_BYTES: tl.constexpr = HEAD_DIM * KEY_BITS // 8
    DATA_BYTES: tl.constexpr = KEY_BYTES + HEAD_DIM * VALUE_BITS // 8
    NUM_FIELDS: tl.constexpr = 2 if KEY_BITS == 8 else 3
    MIDDLE: tl.constexpr = 2 ** (VALUE_BITS - 1)

    # KV heads are innermost: the data of a token's heads are neighbours. Later tiles of a request
    # see more tokens and come first.
    block = tl.program_id(0)
    kv_head = block % kv_heads
    tile = tiles - 1 - (block // kv_heads) % tiles
    split = block // (kv_heads * tiles)

    request = tile
    first = tile
    end = tile + 1
    if query_start is not None:
        request, first, end = _tile_of_request(
            tile, query_start, num_bounds, bounds_per_group, tokens, block_q
        )
    if first >= end:
        return
    length = tl.load(seq_lens + tl.maximum(request, 0))
    length = tl.minimum(tl.where(request >= 0, length, 0), max_blocks * BLOCK_SIZE)
    length = tl.maximum(length, 0)
    request = tl.maximum(request, 0)

    row = tl.arange(0, BLOCK_M)
    token = first + row // group
    head = kv_head * group + row % group
    row_valid = (row < block_q * group) & (token < end)
    # The first position that a row does not see; that of the tile's first and of its last row.
    limit = length - (end - token) + 1
    first_limit = length - (end - first) + 1
    last_limit = length - (end - tl.minimum(first + block_q, end))
    reach = window if WINDOW else last_limit
    high = tl.maximum(last_limit, 0)
    low = 0
    if WINDOW:
        low = tl.maximum(first_limit - window, 0) // BLOCK_N * BLOCK_N
    low += split * chunk
    if split < num_splits - 1:
        high = tl.minimum(high, low + chunk)

    row_out = (token.to(tl.int64) * num_splits + split) * heads + head
    if (low >= high) & (split > 0):
        # The merge takes nothing of a part whose LSE is -inf but the LSE itself.
        tl.store(lse + row_out, float("-inf"), mask=row_valid)
        return

    # Scores are compared as they are and scaled inside the exponent, by `to_log2` > 0.
    softmax_scale = numbers[1][0]
    sign = None
    if scale is not None:
        softmax_scale, sign = load_scale(scale + request // scale_requests)
    codebook = centroids
    unit = 1.0
    if KEY_BITS < 8:
        codebook = centroids + request // centroids_requests * 2**KEY_BITS
        if not EXACT:
            unit = tiles_triton.largest(codebook, 2**KEY_BITS)
    elif not EXACT:
        unit = 256.0

    q_rows = q + (token.to(tl.int64) * heads + head) * HEAD_DIM
    rotation_of = rotation
    if rotation is not None:
        rotation_of = rotation + (request // rotation_requests).to(tl.int64) * HEAD_DIM * HEAD_DIM
    # Packed keys stay in the registers that they are unpacked into; see `unpack_triton`.
    IN_PLACE: tl.constexpr = PACKED and KEY_BITS < 8 and SWAPPED and not DENSE
    column = tl.arange(0, BLOCK_D)
    if IN_PLACE:
        column = unpack_triton.dimension_of_key(column, BLOCK_D)
    if q_largest is not None:
        inside = row_valid[:, None] & (column < HEAD_DIM)[None, :]
        q_tile = tl.load(q_rows[:, None] + column[None, :], mask=inside, other=0.0)
        largest = tl.load(q_largest + token.to(tl.int64) * heads + head, mask=row_valid, other=1.0)
    else:
        q_tile = _query(q_rows, rotation_of, column, row_valid, HEAD_DIM, BLOCK_M, BLOCK_D)
        largest = tl.max(tl.abs(q_tile), axis=1)
        largest = tl.where(largest == 0.0, 1.0, largest)
        if not EXACT:
            q_tile = (q_tile / largest[:, None]).to(tl.float16)
    to_logit = softmax_scale * unit
    if not EXACT:
        to_logit *= largest
    cap = numbers[1][1]
    to_cap = to_logit / cap
    to_log2 = to_logit * LOG2E
    if SOFT_CAP:
        to_log2 = cap * LOG2E
    # Where no row has its own factor, all get the same.
    to_log2 = tl.zeros((BLOCK_M,), tl.float32) + to_log2
    to_cap = tl.zeros((BLOCK_M,), tl.float32) + to_cap

    # Matrices have their queries along axis 1 - TOKENS, and tokens or dimensions along TOKENS.
    TOKENS: tl.constexpr = 0 if SWAPPED else 1
    BY_TOKEN: tl.constexpr = (BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Tokens along axis 0 lie in all warps, so their sums stay apart until the end.
    total = tl.zeros(BY_TOKEN if SWAPPED else (BLOCK_M,), tl.float32)
    middle = tl.zeros(BY_TOKEN if SWAPPED else (BLOCK_M,), tl.float32)
    # Where values' scales are in the weights, these are the sum of two numbers of 16 bits.
    TWO_PARTS: tl.constexpr = not EXACT and not DENSE
    COLUMNS: tl.constexpr = 2 * BLOCK_M if TWO_PARTS else BLOCK_M
    acc = tl.zeros((BLOCK_D, COLUMNS) if SWAPPED else (BLOCK_M, BLOCK_D), tl.float32)
    byte_tables = 0
    if PACKED and KEY_BITS < 8 and not DENSE:
        byte_tables = unpack_triton.byte_tables(codebook, unit, KEY_BITS)
    table = block_table + request.to(tl.int64) * max_blocks
    block_bytes = tl.cast(kv_heads, tl.int64) * (BLOCK_SIZE * SLOT_BYTES)
    metadata = cache + (BLOCK_SIZE * kv_heads * DATA_BYTES + 2 * kv_head * NUM_FIELDS * BLOCK_SIZE)
    capacity = max_blocks * BLOCK_SIZE
    first_dense = request.to(tl.int64) * capacity
    offset = tl.arange(0, BLOCK_N)
    scale_of_row = tl.expand_dims(to_log2, TOKENS)

    for position in tl.range(low, high, BLOCK_N):
        # Tokens that are not there are read from some block that is, and masked.
        page, valid = tiles_triton.pages(
            table, position, offset, high, max_blocks, num_blocks, BLOCK_SIZE, BLOCK_N
        )
        in_page = (position + offset) % BLOCK_SIZE
        data = (in_page * kv_heads + kv_head) * DATA_BYTES + page * block_bytes
        data = tl.multiple_of(data, [DATA_ALIGN])

        if DENSE:
            dense = first_dense + tl.minimum(position + offset, capacity - 1)
            dense = (dense * kv_heads + kv_head) * HEAD_DIM
            k = tiles_triton.dense(dense_keys, dense, HEAD_DIM, BLOCK_D)
        else:
            k = tiles_triton.keys(
                cache, data, codebook, unit, byte_tables,
                HEAD_DIM, KEY_BITS, BLOCK_D, PACKED, EXACT,
            )  # fmt: skip
        present = valid
        if IN_PLACE:
            k, present = unpack_triton.as_operand(k), unpack_triton.by_row(valid)
        if SWAPPED:
            score = tl.dot(k, tl.trans(q_tile), input_precision="ieee")
        else:
            score = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        at = metadata, table, position, max_blocks, num_blocks, block_bytes
        FIRST: tl.constexpr = 0 if KEY_BITS == 8 else 1
        # Codes are finite whatever lies behind a length; norms need not be.
        masked = tl.expand_dims(tl.where(present, 0.0, float("-inf")), 1 - TOKENS)
        if KEY_BITS < 8:
            k_norm = tiles_triton.metadata(at, 0, BLOCK_SIZE, BLOCK_N, METADATA_ALIGN)
            if IN_PLACE:
                k_norm = unpack_triton.by_row(k_norm)
            score *= tl.expand_dims(tl.where(present, k_norm, 0.0), 1 - TOKENS)
        if sign is not None:
            score *= sign
        score = soft_cap(score, tl.expand_dims(to_cap, TOKENS), SOFT_CAP)
        score += masked
        if (query_start is not None) or WINDOW:
            # Only tiles at the ends of what a row sees need a mask of each element.
            at_an_end = (position + BLOCK_N > first_limit) | (position < last_limit - reach)
            if at_an_end:
                where = position + offset
                if IN_PLACE:
                    where = unpack_triton.by_row(where)
                where = tl.expand_dims(where, 1 - TOKENS)
                seen = where < tl.expand_dims(limit, TOKENS)
                if WINDOW:
                    seen = seen & (where >= tl.expand_dims(limit - window, TOKENS))
                score = tl.where(seen, score, float("-inf"))
        peak, base, shrink = advance(peak, tl.max(score, axis=TOKENS), to_log2)
        shrink_all = tl.expand_dims(shrink, TOKENS)
        weight = tl.exp2(score * scale_of_row - tl.expand_dims(base, TOKENS))

        own = weight if SWAPPED else tl.sum(weight, axis=1)
        total = total * (shrink_all if SWAPPED else shrink) + own
        if DENSE:
            v = tiles_triton.dense(dense_values, dense, HEAD_DIM, BLOCK_D)
        else:
            # What lies behind a length may be NaN, and 0 * NaN is NaN.
            v_scale = tiles_triton.metadata(at, FIRST, BLOCK_SIZE, BLOCK_N, METADATA_ALIGN)
            v_scale = tl.where(valid, v_scale, 0.0)
            v_zero = tiles_triton.metadata(at, FIRST + 1, BLOCK_SIZE, BLOCK_N, METADATA_ALIGN)
            v_middle = tl.where(valid, v_zero, 0.0) + v_scale * MIDDLE
            v = tiles_triton.values(
                cache, data + KEY_BYTES, HEAD_DIM, VALUE_BITS, BLOCK_D, PACKED, EXACT
            )
            if IN_PLACE:
                v, v_scale = unpack_triton.by_row(v), unpack_triton.by_row(v_scale)
                v_middle = unpack_triton.by_row(v_middle)
            of_middle = weight * tl.expand_dims(v_middle, 1 - TOKENS)
            if SWAPPED:
                middle = middle * shrink_all + of_middle
            else:
                middle = middle * shrink + tl.sum(of_middle, axis=1)
            weight *= tl.expand_dims(v_scale, 1 - TOKENS)
        # One bf16 is as inexact as the output itself, and with few tokens both errors count.
        part = weight.to(v.dtype)
        rest = (weight - part.to(tl.float32)).to(v.dtype)
        if SWAPPED:
            if TWO_PARTS:
                part = tl.reshape(tl.join(part, rest), [BLOCK_N, 2 * BLOCK_M])
                shrink_all = tl.reshape(tl.join(shrink_all, shrink_all), [1, 2 * BLOCK_M])
            acc = tl.dot(tl.trans(v), part, acc * shrink_all, input_precision="ieee")
        else:
            acc = tl.dot(part, v, acc * shrink_all, input_precision="ieee")
            if TWO_PARTS:
                acc = tl.dot(rest, v, acc)

    if SWAPPED and TWO_PARTS:
        acc = tl.sum(tl.reshape(acc, [BLOCK_D, BLOCK_M, 2]), axis=2)
    if SWAPPED:
        total = tl.sum(total, axis=0)
        middle = tl.sum(middle, axis=0)
    norm, log_total = normalize(
        peak * to_log2 * LN2, total, sink, request // sink_requests * heads + head, row_valid
    )
    result = acc + tl.expand_dims(middle, TOKENS)
    result *= tl.expand_dims(norm * VALUE_UNIT if DENSE else norm, TOKENS)
    column = tl.arange(0, BLOCK_D)
    if PACKED and VALUE_BITS == 4 and not DENSE:
        column = unpack_triton.dimension_of_value(column)
    inside = tl.expand_dims(row_valid, TOKENS) & tl.expand_dims(column < HEAD_DIM, 1 - TOKENS)
    at = tl.expand_dims(row_out * HEAD_DIM, TOKENS) + tl.expand_dims(column, 1 - TOKENS)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + row_out, log_total, mask=row_valid)


@triton.jit
def _tile_of_request(tile, query_start, num_bounds, bounds_per_group, tokens, block_q):
    """The request of a query tile (-1: of none), the tile's first token, and the request's end.

    Bounds cut the tokens into segments, before the first bound, between two, and behind the last;
    each has as many tiles as it begins. Those before the first and behind the last bound of a
    group belong to no request.
    """
    SCAN: tl.constexpr = 128
    segment = num_bounds * 0
    before = num_bounds * 0  # tiles of the segments that end before this tile
    dealt = num_bounds * 0
    for start in range(0, num_bounds + 1, SCAN):
        index = start + tl.arange(0, SCAN)
        exists = index <= num_bounds
        count = (_segment_tokens(index, query_start, num_bounds, tokens) + block_q - 1) // block_q
        count = tl.where(exists, count, 0)
        last = dealt + tl.cumsum(count, axis=0)
        done = exists & (last <= tile)
        segment += tl.sum(done.to(tl.int32), axis=0)
        before = tl.maximum(before, tl.max(tl.where(done, last, 0), axis=0))
        dealt += tl.sum(count, axis=0)
    first, end = _segment(segment, query_start, num_bounds, tokens)
    first = tl.where(segment > num_bounds, tokens, first + (tile - before) * block_q)
    index = segment - 1
    request = index // bounds_per_group * (bounds_per_group - 1) + index % bounds_per_group
    is_one = (index >= 0) & (index % bounds_per_group < bounds_per_group - 1)
    return tl.where(is_one, request, -1), first, end


@triton.jit
def _segment(index, query_start, num_bounds, tokens):
    """First token and end of a segment, or of a vector of them."""
    first = tl.load(query_start + index - 1, mask=(index > 0) & (index <= num_bounds), other=0)
    end = tl.load(query_start + index, mask=index < num_bounds, other=2147483647)
    return tl.minimum(tl.maximum(first, 0), tokens), tl.minimum(tl.maximum(end, 0), tokens)


@triton.jit
def _segment_tokens(index, query_start, num_bounds, tokens):
    first, end = _segment(index, query_start, num_bounds, tokens)
    return tl.maximum(end - first, 0)


@triton.jit
def _query(q_rows, rotation, column, row_valid, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """Columns of the rotated query, f32 [BLOCK_M, WIDTH]; as it is without a rotation."""
    inside = (column < HEAD_DIM)[None, :]
    if rotation is None:
        at = q_rows[:, None] + column[None, :]
        result = tl.load(at, mask=row_valid[:, None] & inside, other=0.0).to(tl.float32)
    else:
        # Float32 matrix times 16-bit queries as two products of 16 bits, exact to 2**-17.
        STEP: tl.constexpr = 16 if q_rows.dtype.element_ty == tl.float32 else 32
        result = tl.zeros((BLOCK_M, WIDTH), tl.float32)
        for start in range(0, HEAD_DIM, STEP):
            k = start + tl.arange(0, STEP)
            present = row_valid[:, None] & (k < HEAD_DIM)[None, :]
            part = tl.load(q_rows[:, None] + k[None, :], mask=present, other=0.0)
            rows = tl.load(
                rotation + column[None, :] * HEAD_DIM + k[:, None],
                mask=inside & (k < HEAD_DIM)[:, None],
                other=0.0,
            )
            high = rows.to(part.dtype)
            result = tl.dot(part, high, result, input_precision="tf32x3")
            if part.dtype != tl.float32:
                low = (rows - high.to(tl.float32)).to(part.dtype)
                result = tl.dot(part, low, result)
    return result
