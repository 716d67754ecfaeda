"""Codes to 16-bit floats in registers, a few instructions for many elements (sm_80 and later).

A byte permute, `prmt`, looks up four nibbles at once in a table of eight bytes: its selector is
four nibbles, of which it uses three bits. So a codebook of fp16 is kept as two byte tables, low
and high bytes; two permutes (four with 16 entries, and a select by the fourth bit) and one to
merge low with high bytes make two elements.

A small integer becomes bf16 by putting it under the exponent of 128: 0x4300 | code is 128 + code.
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

# Elements are given one by one ($0 to $7), so that the compiler may keep them in pairs as they are.

# Sixteen entries: elements of the eight nibbles of $8, by tables of
# $9 to $12 low bytes, $13 to $16 high.
_KEYS_OF_4_BITS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 sel, up, mask, a, b, low, high, pair;
    and.b32 sel, $8, 0x77777777;
    shl.b32 up, $8, 4;
    prmt.b32 mask, up, $8, 0xD9C8; // all bits of a byte: the nibble's fourth
    prmt.b32 a, $9, $10, sel;
    prmt.b32 b, $11, $12, sel;
    lop3.b32 low, a, b, mask, 0xD8; // mask ? b : a
    prmt.b32 a, $13, $14, sel;
    prmt.b32 b, $15, $16, sel;
    lop3.b32 high, a, b, mask, 0xD8;
    prmt.b32 pair, low, high, 0x5140;
    mov.b32 {$0, $1}, pair;
    prmt.b32 pair, low, high, 0x7362;
    mov.b32 {$2, $3}, pair;
    shr.b32 sel, sel, 16;
    prmt.b32 mask, up, $8, 0xFBEA;
    prmt.b32 a, $9, $10, sel;
    prmt.b32 b, $11, $12, sel;
    lop3.b32 low, a, b, mask, 0xD8;
    prmt.b32 a, $13, $14, sel;
    prmt.b32 b, $15, $16, sel;
    lop3.b32 high, a, b, mask, 0xD8;
    prmt.b32 pair, low, high, 0x5140;
    mov.b32 {$4, $5}, pair;
    prmt.b32 pair, low, high, 0x7362;
    mov.b32 {$6, $7}, pair;
    }"""
)

# The eight nibbles of $8 minus 8, the even ones first. The last step adds -136.
_VALUES_OF_4_BITS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 low, high, pair, one, bias;
    mov.b32 one, 0x3F803F80;
    mov.b32 bias, 0xC308C308;
    and.b32 low, $8, 0x0F0F0F0F;
    shr.b32 high, $8, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 pair, low, 0x43434343, 0x4140;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$0, $1}, pair;
    prmt.b32 pair, low, 0x43434343, 0x4342;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$2, $3}, pair;
    prmt.b32 pair, high, 0x43434343, 0x4140;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$4, $5}, pair;
    prmt.b32 pair, high, 0x43434343, 0x4342;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$6, $7}, pair;
    }"""
)

# Eight entries. $0 to $7: elements of eight 3-bit codes in the 24 bits $8; tables $9 to $12.
_KEYS_OF_3_BITS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 sel, up, low, high, pair;
    and.b32 sel, $8, 0xFFF;
    shl.b32 up, $8, 4;
    lop3.b32 sel, up, 0x0FFF0000, sel, 0xEA; // (up & constant) | sel
    shl.b32 up, sel, 2;
    and.b32 sel, sel, 0x003F003F;
    lop3.b32 sel, up, 0x3F003F00, sel, 0xEA;
    shl.b32 up, sel, 1;
    and.b32 sel, sel, 0x07070707;
    lop3.b32 sel, up, 0x70707070, sel, 0xEA;
    prmt.b32 low, $9, $10, sel;
    prmt.b32 high, $11, $12, sel;
    prmt.b32 pair, low, high, 0x5140;
    mov.b32 {$0, $1}, pair;
    prmt.b32 pair, low, high, 0x7362;
    mov.b32 {$2, $3}, pair;
    shr.b32 sel, sel, 16;
    prmt.b32 low, $9, $10, sel;
    prmt.b32 high, $11, $12, sel;
    prmt.b32 pair, low, high, 0x5140;
    mov.b32 {$4, $5}, pair;
    prmt.b32 pair, low, high, 0x7362;
    mov.b32 {$6, $7}, pair;
    }"""
)

# $0 to $7: eight 3-bit codes in the 24 bits $8, minus 4. Times 8193 a copy of twelve bits lies
# 13 higher: the odd codes are then 16 above the even ones before them. The last step adds -132.
_VALUES_OF_3_BITS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 four, pair, one, bias;
    mov.b32 one, 0x3F803F80;
    mov.b32 bias, 0xC304C304;
    and.b32 four, $8, 0xFFF;
    mul.lo.u32 four, four, 8193;
    lop3.b32 pair, four, 0x00070007, 0x43004300, 0xEA; // (four & constant) | constant
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$0, $1}, pair;
    shr.b32 four, four, 6;
    lop3.b32 pair, four, 0x00070007, 0x43004300, 0xEA;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$2, $3}, pair;
    bfe.u32 four, $8, 12, 12;
    mul.lo.u32 four, four, 8193;
    lop3.b32 pair, four, 0x00070007, 0x43004300, 0xEA;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$4, $5}, pair;
    shr.b32 four, four, 6;
    lop3.b32 pair, four, 0x00070007, 0x43004300, 0xEA;
    fma.rn.bf16x2 pair, pair, one, bias;
    mov.b32 {$6, $7}, pair;
    }"""
)

# $0 to $3: the four e4m3 of $4 as fp16 divided by 256, which is the same bits at another place.
_KEYS_OF_8_BITS: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 pair, number;
    prmt.b32 pair, $4, 0, 0x1404;
    shr.b32 number, pair, 1;
    and.b32 number, number, 0x3F803F80;
    lop3.b32 number, pair, 0x80008000, number, 0xEA; // (pair & constant) | number
    mov.b32 {$0, $1}, number;
    prmt.b32 pair, $4, 0, 0x3424;
    shr.b32 number, pair, 1;
    and.b32 number, number, 0x3F803F80;
    lop3.b32 number, pair, 0x80008000, number, 0xEA;
    mov.b32 {$2, $3}, number;
    }"""
)

_HALVES_OF_4: tl.constexpr = tl.constexpr((tl.float16,) * 4)
_HALVES_OF_8: tl.constexpr = tl.constexpr((tl.float16,) * 8)
_BRAINS_OF_8: tl.constexpr = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def byte_tables(centroids, unit, KEY_BITS: tl.constexpr):
    """A codebook divided by `unit`, as fp16: tables of the low bytes, then of the high bytes."""
    a, e = _four(centroids, unit)
    b, f = _four(centroids + 4, unit)
    if KEY_BITS == 3:
        return a, b, e, f
    c, g = _four(centroids + 8, unit)
    d, h = _four(centroids + 12, unit)
    return a, b, c, d, e, f, g, h


@triton.jit
def _four(centroids, unit):
    """Four entries: their low bytes and their high bytes."""
    a, b = _bits(centroids, unit), _bits(centroids + 1, unit)
    c, d = _bits(centroids + 2, unit), _bits(centroids + 3, unit)
    low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | ((d & 255) << 24)
    high = (a >> 8) | ((b >> 8) << 8) | ((c >> 8) << 16) | ((d >> 8) << 24)
    return low, high


@triton.jit
def _bits(centroid, unit):
    return (tl.load(centroid) / unit).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)


@triton.jit
def keys_of_8_bits(words):
    """Words [N, W] of four e4m3 as these divided by 256, fp16 [N, 4 W]."""
    a, b, c, d = tl.inline_asm_elementwise(
        _KEYS_OF_8_BITS,
        "=h,=h,=h,=h,r",
        [words],
        dtype=_HALVES_OF_4,
        is_pure=True,
        pack=1,
    )
    return tl.reshape(_four_of(a, b, c, d), [words.shape[0], words.shape[1] * 4])


@triton.jit
def keys_of_4_bits(words, tables):
    """Words [N, W] of eight codes as elements, fp16 [N, 8 W]."""
    a, b, c, d, e, f, g, h = tables
    keys = tl.inline_asm_elementwise(
        _KEYS_OF_4_BITS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r,r,r,r,r",
        [words, a, b, c, d, e, f, g, h],
        dtype=_HALVES_OF_8,
        is_pure=True,
        pack=1,
    )
    return _eight_of(keys)


@triton.jit
def values_of_4_bits(words):
    """Words [N, W] of eight codes as the codes minus 8, bf16 [N, 8 W].

    Of each eight the even ones come first, see `dimension_of_value`.
    """
    values = tl.inline_asm_elementwise(
        _VALUES_OF_4_BITS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [words],
        dtype=_BRAINS_OF_8,
        is_pure=True,
        pack=1,
    )
    return _eight_of(values)


# Unpacked keys are the first operand of mma, in registers: each lane of four holds two elements
# here and two there of every 16 of its row. Columns and rows of a product may have any order, so
# they get the one in which keys lie in the registers already: a lane of four has a quarter of a
# row, and a warp of four eight rows at a time, where mma wants it to have 16. In another order all
# keys would go through shared memory once more.


@triton.jit
def as_operand(keys):
    """Keys [N, D] in the order of `dimension_of_key` and, where N is a multiple of 64, `by_row`."""
    parts = tl.reshape(keys, [keys.shape[0], 4, keys.shape[1] // 16, 2, 2])
    return by_row(tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), keys.shape))


@triton.jit
def dimension_of_key(column, D: tl.constexpr):
    """The dimension that a column of `as_operand` is."""
    step, half, lane, pair = column >> 4, (column >> 3) & 1, (column >> 1) & 3, column & 1
    return lane * (D // 4) + step * 4 + half * 2 + pair


@triton.jit
def by_row(x):
    """What a tile has for each token, [N] or [N, D], in the order of the rows of `as_operand`."""
    TOKENS: tl.constexpr = x.shape[0]
    if TOKENS % 64 == 0:
        if len(x.shape) == 1:
            rows = tl.permute(tl.reshape(x, [TOKENS // 64, 2, 4, 8]), (0, 2, 1, 3))
        else:
            rows = tl.reshape(x, [TOKENS // 64, 2, 4, 8, x.shape[1]])
            rows = tl.permute(rows, (0, 2, 1, 3, 4))
        x = tl.reshape(rows, x.shape)
    return x


@triton.jit
def dimension_of_value(column):
    """The dimension that a column of `values_of_4_bits` is."""
    return (column & -8) | ((column & 3) << 1) | ((column >> 2) & 1)


@triton.jit
def keys_of_3_bits(first, second, third, tables):
    """Three words [N, W] of 32 codes as elements, fp16 [N, 32 W]."""
    a, b, c, d = _groups(first, second, third)
    return _in_order(
        _keys_of_group(a, tables),
        _keys_of_group(b, tables),
        _keys_of_group(c, tables),
        _keys_of_group(d, tables),
    )


@triton.jit
def values_of_3_bits(first, second, third):
    """Three words [N, W] of 32 codes as the codes minus 4, bf16 [N, 32 W]."""
    a, b, c, d = _groups(first, second, third)
    return _in_order(
        _values_of_group(a), _values_of_group(b), _values_of_group(c), _values_of_group(d)
    )


@triton.jit
def _groups(first, second, third):
    """Four times eight codes, in 24 bits each; what is above them is not cleared."""
    return first, (first >> 24) | (second << 8), (second >> 16) | (third << 16), third >> 8


@triton.jit
def _keys_of_group(data, tables):
    a, b, c, d = tables
    return tl.inline_asm_elementwise(
        _KEYS_OF_3_BITS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r,r,r",
        [data, a, b, c, d],
        dtype=_HALVES_OF_8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _values_of_group(data):
    return tl.inline_asm_elementwise(
        _VALUES_OF_3_BITS,
        "=h,=h,=h,=h,=h,=h,=h,=h,r",
        [data],
        dtype=_BRAINS_OF_8,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _eight_of(x):
    """Element 8 w + i of a row is element w of the i-th; each join adds a lower bit of i."""
    even, odd = _four_of(x[0], x[2], x[4], x[6]), _four_of(x[1], x[3], x[5], x[7])
    return tl.reshape(tl.join(even, odd), [x[0].shape[0], x[0].shape[1] * 8])


@triton.jit
def _in_order(a, b, c, d):
    """Element 32 w + 8 j + i of a row is element w of the i-th of the j-th argument."""
    x0 = tl.join(_four_of(a[0], b[0], c[0], d[0]), _four_of(a[4], b[4], c[4], d[4]))
    x1 = tl.join(_four_of(a[1], b[1], c[1], d[1]), _four_of(a[5], b[5], c[5], d[5]))
    x2 = tl.join(_four_of(a[2], b[2], c[2], d[2]), _four_of(a[6], b[6], c[6], d[6]))
    x3 = tl.join(_four_of(a[3], b[3], c[3], d[3]), _four_of(a[7], b[7], c[7], d[7]))
    joined = tl.join(tl.join(x0, x2), tl.join(x1, x3))
    return tl.reshape(joined, [joined.shape[0], joined.shape[1] * 32])


@triton.jit
def _four_of(a, b, c, d):
    return tl.join(tl.join(a, c), tl.join(b, d))
