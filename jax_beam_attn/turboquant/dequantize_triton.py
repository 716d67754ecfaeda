"""Dequantising the tokens of all requests before attention, where many queries meet each.

Keys become fp16 without their norms, divided by the codebook's largest centroid, as the attention
kernel has them in its registers. Values become fp16 divided by `VALUE_UNIT`: a scale and a zero
point of 16 bits make no more than 16 times the largest fp16, and bf16 would be as inexact as the
output itself.
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from jax_beam_attn._core.triton_call import triton_call
from jax_beam_attn.turboquant import tiles_triton, unpack_triton

_BLOCK_N = 64

VALUE_UNIT: tl.constexpr = tl.constexpr(16.0)


def format_constants(format) -> dict[str, int]:
    """What kernels that read a cache are compiled for."""
    data_bytes = format.key_bytes + format.value_bytes
    return {
        "KEY_BITS": format.key_bits,
        "VALUE_BITS": format.value_bits,
        "BLOCK_SIZE": format.block_size,
        "SLOT_BYTES": format.slot_bytes,
        "DATA_ALIGN": math.gcd(16, format.block_bytes, format.key_bytes, data_bytes),
        "METADATA_ALIGN": math.gcd(
            4, format.block_bytes, format.metadata_start, 2 * format.block_size
        ),
    }


def dequantize_requests(operands, call, plan):
    """Keys and values, fp16 [S, capacity, Hkv, D] each; finite up to each tile's end."""
    format = call.static.format
    requests, max_blocks = operands["block_table"].shape
    capacity = max_blocks * format.block_size
    block_n = max(_BLOCK_N, plan.block_n)
    tiles = triton.cdiv(capacity, block_n)
    centroids = operands.get("centroids")
    tokens = jax.ShapeDtypeStruct(
        (requests, capacity, format.num_kv_heads, format.head_dim), jnp.float16
    )
    return triton_call(
        dequantize_kernel,
        [operands["cache"], operands["block_table"], operands["seq_lens"], centroids],
        (
            format.num_kv_heads,
            max_blocks,
            operands["cache"].shape[0],
            tiles,
            requests // centroids.shape[0] if centroids is not None else 1,
        ),
        [tokens, tokens],
        grid=(requests * tiles * format.num_kv_heads,),
        target=call.target,
        num_warps=4,
        HEAD_DIM=format.head_dim,
        **format_constants(format),
        BLOCK_N=block_n,
        BLOCK_D=max(16, triton.next_power_of_2(format.head_dim)),
        PACKED=plan.packed,
    )


@triton.jit
def dequantize_kernel(
    cache,
    block_table,
    seq_lens,
    centroids,
    sizes,
    keys,
    values,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOT_BYTES: tl.constexpr,
    DATA_ALIGN: tl.constexpr,
    METADATA_ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PACKED: tl.constexpr,
):
    """A tile of one request's tokens in one KV head; nothing behind the request's length."""
    kv_heads, max_blocks, num_blocks, tiles, per_codebook = (
        sizes[0], sizes[1], sizes[2], sizes[3], sizes[4],
    )  # fmt: skip
    KEY_BYTES: tl.constexpr = HEAD_DIM * KEY_BITS // 8
    DATA_BYTES: tl.constexpr = KEY_BYTES + HEAD_DIM * VALUE_BITS // 8
    NUM_FIELDS: tl.constexpr = 2 if KEY_BITS == 8 else 3
    block = tl.program_id(0)
    kv_head = block % kv_heads
    position = (block // kv_heads) % tiles * BLOCK_N
    request = block // (kv_heads * tiles)
    length = tl.minimum(tl.load(seq_lens + request), max_blocks * BLOCK_SIZE)
    if position >= length:
        return

    unit = 256.0
    codebook = centroids
    byte_tables = 0
    if KEY_BITS < 8:
        codebook = centroids + request // per_codebook * 2**KEY_BITS
        unit = tiles_triton.largest(codebook, 2**KEY_BITS)
        if PACKED:
            byte_tables = unpack_triton.byte_tables(codebook, unit, KEY_BITS)
    table = block_table + request.to(tl.int64) * max_blocks
    block_bytes = tl.cast(kv_heads, tl.int64) * (BLOCK_SIZE * SLOT_BYTES)
    metadata = cache + (BLOCK_SIZE * kv_heads * DATA_BYTES + 2 * kv_head * NUM_FIELDS * BLOCK_SIZE)
    offset = tl.arange(0, BLOCK_N)
    page, valid = tiles_triton.pages(
        table, position, offset, length, max_blocks, num_blocks, BLOCK_SIZE, BLOCK_N
    )
    data = ((position + offset) % BLOCK_SIZE * kv_heads + kv_head) * DATA_BYTES + page * block_bytes
    data = tl.multiple_of(data, [DATA_ALIGN])
    k = tiles_triton.keys(
        cache, data, codebook, unit, byte_tables, HEAD_DIM, KEY_BITS, BLOCK_D, PACKED, False
    )
    v = tiles_triton.values(cache, data + KEY_BYTES, HEAD_DIM, VALUE_BITS, BLOCK_D, PACKED, False)
    at = metadata, table, position, max_blocks, num_blocks, block_bytes
    FIRST: tl.constexpr = NUM_FIELDS - 2
    scale = tiles_triton.metadata(at, FIRST, BLOCK_SIZE, BLOCK_N, METADATA_ALIGN)
    zero = tiles_triton.metadata(at, FIRST + 1, BLOCK_SIZE, BLOCK_N, METADATA_ALIGN)
    scale, zero = tl.where(valid, scale, 0.0), tl.where(valid, zero, 0.0)
    middle = zero + scale * 2 ** (VALUE_BITS - 1)
    v = (v.to(tl.float32) * scale[:, None] + middle[:, None]) / VALUE_UNIT

    capacity = max_blocks * BLOCK_SIZE
    row = request.to(tl.int64) * capacity + position + offset
    row = (row * kv_heads + kv_head) * HEAD_DIM
    inside = (position + offset < capacity)[:, None]
    column = tl.arange(0, BLOCK_D)
    mask = inside & (column < HEAD_DIM)[None, :]
    tl.store(keys + row[:, None] + column[None, :], k, mask=mask)
    if PACKED and VALUE_BITS == 4:
        column = unpack_triton.dimension_of_value(column)
        mask = inside & (column < HEAD_DIM)[None, :]
    tl.store(values + row[:, None] + column[None, :], v.to(tl.float16), mask=mask)
