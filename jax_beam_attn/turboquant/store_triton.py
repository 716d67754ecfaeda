"""The cache writer as one kernel (sm_80 and later).

A thread block quantises a few rows, each the key and the value of one token in one KV head. Keys
are rotated in three TF32 products, which is float32's accuracy but for the last bits: one product
would flip one code in 1500.
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jax_beam_attn._core.triton_call import triton_call

_ROWS = 16


def unsupported(operands, call) -> str | None:
    """The reason why the kernel cannot serve the call, or None."""
    if any(operands[n].shape[0] > 1 for n in ("rotation", "centroids") if n in operands):
        return "rotations or codebooks that differ between tokens"
    if call.static.metadata_start % 2 or call.static.block_bytes % 2:
        return "metadata at odd bytes"
    return None


def run(operands, call):
    """Writes the tokens into the cache."""
    format = call.static
    key = operands["key"]
    rows = key.shape[0] * format.num_kv_heads
    if rows == 0:
        return (operands["cache"],)
    return triton_call(
        store_kernel,
        [
            operands["cache"],
            key,
            operands["value"],
            operands["slots"],
            operands.get("rotation"),
            operands.get("centroids"),
        ],
        (rows, format.num_kv_heads, operands["cache"].shape[0] * format.block_size),
        [jax.ShapeDtypeStruct(operands["cache"].shape, jnp.uint8)],
        grid=(triton.cdiv(rows, _ROWS),),
        target=call.target,
        num_warps=4,
        in_place={0: 0},
        HEAD_DIM=format.head_dim,
        KEY_BITS=format.key_bits,
        VALUE_BITS=format.value_bits,
        NORM_CORRECTION=format.norm_correction,
        BLOCK_SIZE=format.block_size,
        SLOT_BYTES=format.slot_bytes,
        ROWS=_ROWS,
        BLOCK_D=max(16, triton.next_power_of_2(format.head_dim)),
    )


@triton.jit
def store_kernel(
    cache,
    key,
    value,
    slots,
    rotation,
    centroids,
    sizes,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    NORM_CORRECTION: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Quantises ROWS rows and writes them."""
    rows, kv_heads, num_slots = sizes[0], sizes[1], sizes[2]
    KEY_BYTES: tl.constexpr = HEAD_DIM * KEY_BITS // 8
    DATA_BYTES: tl.constexpr = KEY_BYTES + HEAD_DIM * VALUE_BITS // 8
    NUM_FIELDS: tl.constexpr = 2 if KEY_BITS == 8 else 3
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = row % kv_heads
    slot = tl.load(slots + row // kv_heads, mask=row < rows, other=-1)
    inside = (slot >= 0) & (slot < num_slots)
    offset = slot % BLOCK_SIZE
    block_bytes = tl.cast(kv_heads, tl.int64) * (BLOCK_SIZE * SLOT_BYTES)
    block = cache + (slot // BLOCK_SIZE).to(tl.int64) * block_bytes
    data = block + (offset * kv_heads + head) * DATA_BYTES
    metadata = block + BLOCK_SIZE * kv_heads * DATA_BYTES
    metadata += 2 * (head * NUM_FIELDS * BLOCK_SIZE + offset)

    column = tl.arange(0, BLOCK_D)
    present = inside[:, None] & (column < HEAD_DIM)[None, :]
    at = row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    k = tl.load(key + at, mask=present, other=0.0).to(tl.float32)
    FIRST: tl.constexpr = 0 if KEY_BITS == 8 else 1
    if KEY_BITS == 8:
        tl.store(data[:, None] + column[None, :], _e4m3(k), mask=present)
    else:
        # Squares of what is far beyond any 16-bit norm would overflow.
        peak = tl.max(tl.abs(k), axis=1)
        unit = tl.where(peak > 1e15, peak, 1.0)
        k = tl.div_rn(k, unit[:, None] + 0.0 * k)
        norm = tl.sqrt_rn(tl.sum(k * k, axis=1))
        shrink = tl.div_rn(1.0 + 0.0 * unit, norm + tl.div_rn(1e-8 + 0.0 * unit, unit))
        rotated = tl.zeros((ROWS, BLOCK_D), tl.float32)
        STEP: tl.constexpr = 16
        for start in range(0, HEAD_DIM, STEP):
            i = start + tl.arange(0, STEP)
            here = inside[:, None] & (i < HEAD_DIM)[None, :]
            part = tl.load(
                key + row.to(tl.int64)[:, None] * HEAD_DIM + i[None, :], mask=here, other=0.0
            )
            part = part.to(tl.float32) / unit[:, None]
            matrix = tl.load(
                rotation + column[None, :] * HEAD_DIM + i[:, None],
                mask=(column < HEAD_DIM)[None, :] & (i < HEAD_DIM)[:, None],
                other=0.0,
            )
            rotated = tl.dot(part, matrix, rotated, input_precision="tf32x3")
        rotated *= shrink[:, None]
        code = tl.zeros((ROWS, BLOCK_D), tl.int32)
        for level in tl.static_range(0, 2**KEY_BITS - 1):
            low, high = tl.load(centroids + level), tl.load(centroids + level + 1)
            code += (rotated >= (low + high) / 2).to(tl.int32)
        norm *= unit
        if NORM_CORRECTION:
            chosen = tl.load(centroids + code, mask=present, other=0.0)
            length = tl.sqrt_rn(tl.sum(chosen * chosen, axis=1) + 1e-16)
            norm = tl.div_rn(norm, length)
        _store_codes(data, code, inside, HEAD_DIM, KEY_BITS, ROWS, BLOCK_D)
        _store_field(metadata, tl.minimum(norm, 65504.0), inside)

    v = tl.load(value + at, mask=present, other=0.0).to(tl.float32)
    in_head = (column < HEAD_DIM)[None, :]
    low = tl.min(tl.where(in_head, v, float("inf")), axis=1)
    high = tl.max(tl.where(in_head, v, float("-inf")), axis=1)
    low = tl.minimum(tl.maximum(low, -65504.0), 65504.0)
    TOP: tl.constexpr = 2**VALUE_BITS - 1
    # As in `cache.quantize_value`, operation by operation.
    RECIPROCAL: tl.constexpr = 1 / TOP
    scale = (high - low) * RECIPROCAL
    scale = tl.minimum(tl.maximum(scale, 1e-8), 65504.0)
    halves = tl.floor((v - low[:, None]) * tl.div_rn(2.0 + 0.0 * scale, scale)[:, None])
    code = (tl.minimum(tl.maximum(halves, 0.0), 2 * TOP).to(tl.int32) + 1) >> 1
    _store_codes(data + KEY_BYTES, code, inside, HEAD_DIM, VALUE_BITS, ROWS, BLOCK_D)
    _store_field(metadata + 2 * FIRST * BLOCK_SIZE, scale, inside)
    _store_field(metadata + 2 * (FIRST + 1) * BLOCK_SIZE, low, inside)


@triton.jit
def _store_field(at, number, inside):
    tl.store(at.to(tl.pointer_type(tl.float16)), number.to(tl.float16), mask=inside)


@triton.jit
def _store_codes(data, code, inside, HEAD_DIM: tl.constexpr, BITS: tl.constexpr,
                 ROWS: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Writes codes i32 [ROWS, BLOCK_D]: eight in BITS bytes, code i from bit i * BITS on."""
    eights = tl.reshape(code, [ROWS, BLOCK_D // 8, 8])
    word = tl.sum(eights << (BITS * tl.arange(0, 8))[None, None, :], axis=2)
    group = tl.arange(0, BLOCK_D // 8)
    mask = inside[:, None] & (group < HEAD_DIM // 8)[None, :]
    for byte in tl.static_range(0, BITS):
        at = data[:, None] + (group * BITS + byte)[None, :]
        tl.store(at, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def _e4m3(x):
    """Float32 as the bits of e4m3, to nearest even, at most 448.

    Normal numbers lose 20 bits of their mantissa and 120 of their exponent; below 2**-6 the
    steps are 2**-9, which is float32's step at 2**14.
    """
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
