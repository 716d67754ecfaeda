"""Loading tiles of a cache: blocks, metadata, keys and values."""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from jax_beam_attn.turboquant import unpack_triton


@triton.jit
def pages(table, position, offset, high, max_blocks, num_blocks, BLOCK_SIZE: tl.constexpr,
           BLOCK_N: tl.constexpr):  # fmt: skip
    """The block of each token of a tile, and which tokens are there; the others get any block."""
    if BLOCK_SIZE % BLOCK_N == 0:
        page = tl.load(table + position // BLOCK_SIZE)
    else:
        page = tl.load(table + tl.minimum((position + offset) // BLOCK_SIZE, max_blocks - 1))
    valid = (position + offset < high) & (page >= 0) & (page < num_blocks)
    return tl.minimum(tl.maximum(page, 0), num_blocks - 1).to(tl.int64), valid


@triton.jit
def metadata(at, FIELD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
              ALIGN: tl.constexpr):  # fmt: skip
    """One 16-bit float of each token of a tile, as f32 [BLOCK_N]."""
    metadata, table, position, max_blocks, num_blocks, block_bytes = at
    # Two tokens at once where that is possible: loads of four bytes can be asynchronous.
    offset = 2 * tl.arange(0, BLOCK_N // 2) if ALIGN == 4 else tl.arange(0, BLOCK_N)
    page, _ = pages(table, position, offset, 0, max_blocks, num_blocks, BLOCK_SIZE, BLOCK_N)
    byte = page * block_bytes + (2 * FIELD * BLOCK_SIZE + 2 * ((position + offset) % BLOCK_SIZE))
    if ALIGN == 4:
        pair = tl.load((metadata + byte).to(tl.pointer_type(tl.uint32)))
        low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
        number = tl.reshape(tl.join(low, high), [BLOCK_N])
    elif ALIGN == 2:
        number = tl.load((metadata + byte).to(tl.pointer_type(tl.float16)))
    else:
        low = tl.load(metadata + byte).to(tl.uint16)
        high = tl.load(metadata + byte + 1).to(tl.uint16)
        number = (low | (high << 8)).to(tl.float16, bitcast=True)
    return number.to(tl.float32)


@triton.jit
def largest(centroids, count: tl.constexpr):
    """The largest magnitude of a codebook, 1 if it is 0."""
    largest = tl.max(tl.abs(tl.load(centroids + tl.arange(0, count))), axis=0)
    return tl.where(largest == 0.0, 1.0, largest)


@triton.jit
def codes(cache, data, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Codes of a tile, i32 [BLOCK_N, BLOCK_D], each from the two bytes that it may be in."""
    bit = tl.arange(0, BLOCK_D) * BITS
    byte = bit // 8
    SIZE: tl.constexpr = HEAD_DIM * BITS // 8
    at = cache + data[:, None] + byte[None, :]
    low = tl.load(at, mask=(byte < SIZE)[None, :], other=0).to(tl.int32)
    high = tl.load(at + 1, mask=(byte + 1 < SIZE)[None, :], other=0).to(tl.int32)
    return ((low | (high << 8)) >> (bit % 8)[None, :]) & (2**BITS - 1)


@triton.jit
def keys(cache, data, codebook, unit, byte_tables, HEAD_DIM: tl.constexpr,
          KEY_BITS: tl.constexpr, BLOCK_D: tl.constexpr, PACKED: tl.constexpr,
          EXACT: tl.constexpr):  # fmt: skip
    """Keys of a tile without their norms, divided by `unit`: [BLOCK_N, BLOCK_D]."""
    if PACKED and KEY_BITS == 3:
        first, second, third = _three_words(cache, data, HEAD_DIM, BLOCK_D)
        key = unpack_triton.keys_of_3_bits(first, second, third, byte_tables)
    elif PACKED:
        words = _words(cache, data, HEAD_DIM * KEY_BITS // 32, BLOCK_D * KEY_BITS // 32)
        if KEY_BITS == 4:
            key = unpack_triton.keys_of_4_bits(words, byte_tables)
        else:
            key = unpack_triton.keys_of_8_bits(words)
    else:
        code = codes(cache, data, HEAD_DIM, KEY_BITS, BLOCK_D)
        if KEY_BITS == 8:
            bits = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.uint16)
            key = bits.to(tl.float16, bitcast=True).to(tl.float32) * (256.0 / unit)
        else:
            key = tl.load(codebook + code) / unit
        if not EXACT:
            key = key.to(tl.float16)
    return key


@triton.jit
def values(cache, data, HEAD_DIM: tl.constexpr, VALUE_BITS: tl.constexpr, BLOCK_D: tl.constexpr,
            PACKED: tl.constexpr, EXACT: tl.constexpr):  # fmt: skip
    """Codes of the values of a tile minus the middle one: [BLOCK_N, BLOCK_D]."""
    if PACKED and VALUE_BITS == 3:
        first, second, third = _three_words(cache, data, HEAD_DIM, BLOCK_D)
        value = unpack_triton.values_of_3_bits(first, second, third)
    elif PACKED:
        value = unpack_triton.values_of_4_bits(_words(cache, data, HEAD_DIM // 8, BLOCK_D // 8))
    else:
        code = codes(cache, data, HEAD_DIM, VALUE_BITS, BLOCK_D) - 2 ** (VALUE_BITS - 1)
        value = code.to(tl.float32) if EXACT else code.to(tl.bfloat16)
    return value


@triton.jit
def _words(cache, data, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The words of each row of a tile, uint32 [BLOCK_N, BLOCK]."""
    column = tl.arange(0, BLOCK)[None, :]
    at = (cache + data[:, None]).to(tl.pointer_type(tl.uint32)) + column
    return tl.load(at) if COUNT == BLOCK else tl.load(at, mask=column < COUNT, other=0)


@triton.jit
def _three_words(cache, data, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """3-bit codes of a tile, 32 in three words: uint32 [BLOCK_N, BLOCK_D / 32] each."""
    group = tl.arange(0, BLOCK_D // 32)[None, :]
    at = (cache + data[:, None]).to(tl.pointer_type(tl.uint32)) + 3 * group
    inside = group < HEAD_DIM // 32
    first = tl.load(at, mask=inside, other=0)
    second = tl.load(at + 1, mask=inside, other=0)
    third = tl.load(at + 2, mask=inside, other=0)
    return first, second, third


@triton.jit
def dense(array, first, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of an array that begin at `first`: [BLOCK_N, BLOCK_D]."""
    column = tl.arange(0, BLOCK_D)
    at = array + first[:, None] + column[None, :]
    if HEAD_DIM == BLOCK_D:
        row = tl.load(at)
    else:
        row = tl.load(at, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return row
