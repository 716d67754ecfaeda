"""The cache formats: byte layouts, packing, unpacking and appending.

The FP8 formats are FlashMLA's, byte for byte. A cache is a sequence of blocks of `page_size`
tokens; a token's slot is block * page_size + offset.

- "v32", 656 bytes a token: 512 e4m3, four f32 scales (one per 128 of them), 64 bf16 (rope).
- "model1", 584 bytes a token: a block holds first its tokens' 576 bytes (448 e4m3, 64 bf16), then
  its tokens' scales, 8 bytes each: seven e8m0 (one per 64 e4m3) and a pad byte, written as 0.
- "bf16": the key as it is, 576 or 512 wide.

Inside this package an FP8 cache is uint8 [num_blocks, block_bytes]; bytes behind a block's tokens
are padding, never read or written.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn._core import cache_writer, checks, native
from jax_beam_attn._core.handler import Handler
from jax_beam_attn._core.operator import Operator, Output

VALUE_DIM = 512  # the values are the first 512 dimensions of the key
ROPE_DIM = 64
_E4M3_MAX = 448.0
_SMALLEST_AMAX = 1e-4
_INFINITY, _NAN = 0x7F800000, 0x7FC00000  # bits of f32, of the one NaN that is written


@dataclasses.dataclass(frozen=True)
class MlaFormat:
    """An FP8 cache format.

    Attributes:
        name: "v32" or "model1".
        quantized_dim: Dimensions stored in e4m3; the rope follows them.
        group: Dimensions that share a scale.
        row_bytes: Bytes of a token in the block's first part.
        scale_bytes: Bytes of a token in the block's second part; 0 if scales are in the row.
        block_alignment: What a padded block's size is a multiple of.
    """

    name: str
    quantized_dim: int
    group: int
    row_bytes: int
    scale_bytes: int
    block_alignment: int

    @property
    def head_dim(self) -> int:
        """Width of the key, Dqk."""
        return self.quantized_dim + ROPE_DIM

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in both parts of the block."""
        return self.row_bytes + self.scale_bytes

    @property
    def num_groups(self) -> int:
        """Scales of a token."""
        return self.quantized_dim // self.group


V32 = MlaFormat("v32", 512, 128, 656, 0, 16)
MODEL1 = MlaFormat("model1", 448, 64, 576, 8, 8)
FORMATS = {each.name: each for each in (V32, MODEL1)}
BYTE_DTYPES = (jnp.uint8, jnp.int8, jnp.float8_e4m3fn)


def pack_mla_cache(kv: jax.Array, format: str, block_bytes: int | None = None) -> jax.Array:
    """Quantises keys into a new cache.

    Each group's scale is max(|x|, 1e-4) / 448, for model1 rounded up to a power of two (an exact
    power stays); the rope is kept in bf16. Rounding is to nearest, ties to even. An infinity or NaN
    makes NaN of its whole group; every NaN is written as the same one.

    Args:
        kv: [num_blocks, page_size, 1, Dqk], f32 or bf16; Dqk 576 (v32) or 512 (model1).
        format: "v32" or "model1".
        block_bytes: Size of a padded block, a multiple of 16 (v32) or 8 (model1); padding is 0.

    Returns:
        uint8 [num_blocks, page_size, 1, 656 or 584], or [num_blocks, block_bytes].

    Raises:
        ValueError: For a wrong format, shape or block size.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated.

    Source: FlashMLA's FP8 KV cache.

    Example:
        >>> pack_mla_cache(jnp.ones((2, 64, 1, 576)), "v32").shape
        (2, 64, 1, 656)
    """
    checks.one_of("format", format, tuple(FORMATS))
    layout = FORMATS[format]
    checks.dtype("kv", kv, (jnp.float32, jnp.bfloat16))
    checks.shape("kv", kv, ("num_blocks", "page_size", 1, layout.head_dim))
    num_blocks, page_size = kv.shape[:2]
    if block_bytes is not None:
        _check_block_bytes(layout, page_size, block_bytes)
    kv = cache_writer.forward_only("pack_mla_cache", jnp.asarray(kv))
    rows, scales = quantize(kv.reshape(num_blocks, page_size, layout.head_dim), layout)
    parts = (part.reshape(num_blocks, page_size * part.shape[-1]) for part in (rows, scales))
    blocks = jnp.concatenate([*parts], axis=1)
    if block_bytes is None:
        return blocks.reshape(num_blocks, page_size, 1, layout.token_bytes)
    return jnp.pad(blocks, ((0, 0), (0, block_bytes - blocks.shape[1])))


def unpack_mla_cache(cache: jax.Array, format: str, page_size: int | None = None) -> jax.Array:
    """Dequantises a whole cache.

    Args:
        cache: One byte an element, [num_blocks, page_size, 1, 656 or 584], or padded blocks
            [num_blocks, block_bytes].
        format: "v32" or "model1".
        page_size: Tokens of a padded block.

    Returns:
        f32 [num_blocks, page_size, 1, Dqk].

    Raises:
        ValueError: For a wrong format, shape or block size.
        TypeError: For a wrong dtype.

    Example:
        >>> cache = pack_mla_cache(jnp.ones((2, 64, 1, 512)), "model1")
        >>> bool((unpack_mla_cache(cache, "model1") == 1).all())
        True
    """
    checks.one_of("format", format, tuple(FORMATS))
    layout = FORMATS[format]
    blocks, page_size = as_blocks("cache", cache, layout, page_size)
    rows, scales = split_blocks(blocks, layout, page_size)
    return dequantize(rows, scales, layout).reshape(*rows.shape[:2], 1, layout.head_dim)


def append_mla_cache(
    cache: jax.Array,
    kv: jax.Array,
    slot_mapping: jax.Array,
    format: str,
    page_size: int | None = None,
) -> jax.Array:
    """Quantises keys and writes them into their slots, as `pack_mla_cache` would.

    In place when the cache is donated: `jax.jit(append_mla_cache, donate_argnums=0, ...)`.

    Args:
        cache: [num_blocks, page_size, 1, 656 or 584] or padded [num_blocks, block_bytes], one byte
            an element; or bf16 [num_blocks, page_size, 1, Dqk].
        kv: [N, Dqk], f32 or bf16.
        slot_mapping: int [N]; a slot outside the cache, -1 say, writes nothing. What is written
            where two are equal is not specified.
        format: "v32", "model1" or "bf16".
        page_size: Tokens of a padded block.

    Returns:
        The cache with the keys written, same shape and dtype.

    Raises:
        ValueError: For a wrong format, shape or block size; under vmap with mapped updates of one
            shared cache.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated.

    Example:
        >>> cache = jnp.zeros((2, 64, 1, 656), jnp.uint8)
        >>> cache = append_mla_cache(cache, jnp.ones((1, 576)), jnp.array([70]), "v32")
        >>> float(unpack_mla_cache(cache, "v32")[1, 6, 0, 0])
        1.0
    """
    checks.one_of("format", format, (*FORMATS, "bf16"))
    checks.dtype("kv", kv, (jnp.float32, jnp.bfloat16))
    if format == "bf16":
        page_size = check_tokens("cache", cache, page_size)
        head_dim = cache.shape[3]
    else:
        page_size = check_blocks("cache", cache, FORMATS[format], page_size)
        head_dim = FORMATS[format].head_dim
    checks.shape("kv", kv, ("N", head_dim))
    slots = checks.int32("slot_mapping", slot_mapping)
    checks.shape("slot_mapping", slots, (kv.shape[0],))
    (out,) = append({"cache": cache, "kv": kv, "slots": slots}, AppendStatic(format, page_size))
    return out


def as_blocks(
    name: str, cache: jax.Array, layout: MlaFormat, page_size: int | None
) -> tuple[jax.Array, int]:
    """Any public form of an FP8 cache as (uint8 [num_blocks, block_bytes], page_size)."""
    page_size = check_blocks(name, cache, layout, page_size)
    cache = _as_uint8(cache)
    if cache.ndim == 2:
        return cache, page_size
    return cache.reshape(cache.shape[0], page_size * layout.token_bytes), page_size


def as_tokens(name: str, cache: jax.Array, page_size: int | None) -> tuple[jax.Array, int]:
    """A bf16 cache as ([num_blocks, page_size, Dqk], page_size)."""
    page_size = check_tokens(name, cache, page_size)
    return cache.reshape(*cache.shape[:2], cache.shape[3]), page_size


def check_blocks(name: str, cache: jax.Array, layout: MlaFormat, page_size: int | None) -> int:
    """Requires a public form of an FP8 cache; returns its page size."""
    checks.dtype(name, cache, BYTE_DTYPES)
    if cache.ndim == 2:
        if page_size is None:
            raise ValueError(f"page_size: got None, expected an int: {name} has padded blocks")
        _check_block_bytes(layout, page_size, cache.shape[1])
        _check_slots(name, cache, page_size)
        return page_size
    checks.shape(name, cache, ("num_blocks", "page_size", 1, layout.token_bytes))
    return _same_page_size(name, cache, page_size)


def check_tokens(name: str, cache: jax.Array, page_size: int | None) -> int:
    """Requires a bf16 cache; returns its page size."""
    checks.dtype(name, cache, (jnp.bfloat16,))
    checks.shape(name, cache, ("num_blocks", "page_size", 1, "Dqk"))
    checks.one_of(f"{name}'s Dqk", cache.shape[3], (V32.head_dim, MODEL1.head_dim))
    return _same_page_size(name, cache, page_size)


def _same_page_size(name: str, cache: jax.Array, page_size: int | None) -> int:
    if page_size not in (None, cache.shape[1]):
        raise ValueError(f"page_size: got {page_size}, expected {cache.shape[1]}, as in {name}")
    _check_slots(name, cache, cache.shape[1])
    return cache.shape[1]


def _check_slots(name: str, cache: jax.Array, page_size: int) -> None:
    if cache.shape[0] * page_size > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"{name}: got {cache.shape[0]} blocks of {page_size} tokens, expected less than 2**31 "
            "slots"
        )


def _as_uint8(cache: jax.Array) -> jax.Array:
    if cache.dtype == jnp.uint8:
        return cache
    if cache.dtype != jnp.int8:  # of a float JAX would take a derivative: zeros
        cache = cache_writer.forward_only("sparse_mla_decode and unpack_mla_cache", cache)
    return jax.lax.bitcast_convert_type(cache, jnp.uint8)


def _check_block_bytes(layout: MlaFormat, page_size: int, block_bytes: int) -> None:
    checks.at_least_one("page_size", page_size)
    checks.at_least_zero("block_bytes", block_bytes)
    smallest = page_size * layout.token_bytes
    if block_bytes % layout.block_alignment or block_bytes < smallest:
        raise ValueError(
            f"block_bytes: got {block_bytes}, expected a multiple of {layout.block_alignment}, at "
            f"least {smallest} ({page_size} tokens of {layout.name})"
        )


def split_blocks(
    blocks: jax.Array, layout: MlaFormat, page_size: int
) -> tuple[jax.Array, jax.Array]:
    """Blocks as rows uint8 [num_blocks, page_size, row_bytes] and scales [..., scale_bytes]."""
    rows_end = page_size * layout.row_bytes
    rows = blocks[:, :rows_end]
    scales = blocks[:, rows_end : page_size * layout.token_bytes]
    return (
        rows.reshape(len(blocks), page_size, layout.row_bytes),
        scales.reshape(len(blocks), page_size, layout.scale_bytes),
    )


def quantize(kv: jax.Array, layout: MlaFormat) -> tuple[jax.Array, jax.Array]:
    """Keys [..., Dqk] as rows uint8 [..., row_bytes] and scales uint8 [..., scale_bytes].

    The same bytes on every platform and from csrc/mla_format.h: what platforms do not agree on, the
    rounding of a quotient, the maximum of NaN and conversions of NaN and subnormals, is spelled
    out.
    """
    lead = kv.shape[:-1]
    values = kv[..., : layout.quantized_dim].astype(jnp.float32)
    values = values.reshape(*lead, layout.num_groups, layout.group)
    amax = jnp.maximum(jnp.max(_size_bits(values), axis=-1), _bits(_SMALLEST_AMAX))
    scale = jax.lax.bitcast_convert_type(amax, jnp.float32) * jnp.float32(1 / _E4M3_MAX)
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    bits = jnp.where(amax > _INFINITY, jnp.uint32(_NAN), bits)
    scales = jnp.zeros((*lead, 0), jnp.uint8)
    if layout is MODEL1:
        exponent = (bits + 0x7FFFFF) >> 23  # rounded up unless the mantissa is 0
        exponent = jnp.minimum(exponent, 255)  # which stands for NaN
        bits = exponent << 23
        scales = jnp.pad(exponent.astype(jnp.uint8), [(0, 0)] * len(lead) + [(0, 1)])
    divisor = jax.lax.bitcast_convert_type(bits, jnp.float32)
    codes = _e4m3(_quotient(values, divisor[..., None]))
    rope = cache_writer.to_bytes(_bf16(kv[..., layout.quantized_dim :]))
    parts = [codes.reshape(*lead, layout.quantized_dim), rope]
    if layout is V32:
        parts.insert(1, cache_writer.to_bytes(bits))
    return jnp.concatenate(parts, axis=-1), scales


def _quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """Divides in f32, rounding to nearest: XLA's own division on GPUs does not.

    Rounding the quotient of two f32 to f64 first changes nothing: 53 >= 2 * 24 + 2 bits. It is not
    rounded to f32 by conversion, because compilers make a division in f32 of that.
    """
    with jax.enable_x64(True):
        quotient = x.astype(jnp.float64) / y.astype(jnp.float64)
        return jax.lax.reduce_precision(quotient, 8, 23).astype(jnp.float32)


def _e4m3(x: jax.Array) -> jax.Array:
    """The nearest e4m3, ties to even, as uint8; saturates, and NaN is 0x7f."""
    nan = _size_bits(x) > _INFINITY
    size = jnp.minimum(_size_bits(x), _bits(_E4M3_MAX))
    # Three bits of mantissa are left, and the exponent's bias goes from 127 to 7.
    normal = _round_away_bits(size, 20) - (120 << 3)
    # Subnormals count steps of 2**-9, which is the last bit of a float from 2**14 on.
    steps = jax.lax.bitcast_convert_type(size, jnp.float32) + 2.0**14
    subnormal = jax.lax.bitcast_convert_type(steps, jnp.uint32) - _bits(2.0**14)
    code = jnp.where(size < _bits(2.0**-6), subnormal, normal)
    sign = jax.lax.bitcast_convert_type(x, jnp.uint32) >> 24 & 0x80
    return jnp.where(nan, 0x7F, code | sign).astype(jnp.uint8)


def _bf16(x: jax.Array) -> jax.Array:
    """The nearest bf16, ties to even, as uint16; NaN is 0x7fc0."""
    x = x.astype(jnp.float32)
    bits = _round_away_bits(jax.lax.bitcast_convert_type(x, jnp.uint32), 16)
    return jnp.where(_size_bits(x) > _INFINITY, _NAN >> 16, bits).astype(jnp.uint16)


def _size_bits(x: jax.Array) -> jax.Array:
    """The bits of |x|: as integers in the order of the numbers, NaN above infinity."""
    return jax.lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF


def _round_away_bits(bits: jax.Array, count: int) -> jax.Array:
    """The upper bits, rounded to nearest by the lower `count`, ties to even."""
    return (bits + (1 << (count - 1)) - 1 + (bits >> count & 1)) >> count


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def dequantize(rows: jax.Array, scales: jax.Array, layout: MlaFormat) -> jax.Array:
    """Rows and scales, as `quantize` returns them, as f32 [..., Dqk]."""
    lead = rows.shape[:-1]
    codes = jax.lax.bitcast_convert_type(rows[..., : layout.quantized_dim], jnp.float8_e4m3fn)
    values = codes.astype(jnp.float32).reshape(*lead, layout.num_groups, layout.group)
    if layout is V32:
        scale = cache_writer.from_bytes(rows[..., 512:528], jnp.float32)
        values = values * scale[..., None]
    else:
        # 2**(byte - 127) reaches below the normal numbers, so it is applied in two normal halves.
        exponent = scales[..., : layout.num_groups].astype(jnp.int32) - 127
        half = exponent >> 1
        values = values * _power_of_two(half)[..., None]
        values = values * _power_of_two(exponent - half)[..., None]
        values = jnp.where((exponent == 128)[..., None], jnp.nan, values)
    rope = cache_writer.from_bytes(rows[..., -2 * ROPE_DIM :], jnp.bfloat16).astype(jnp.float32)
    return jnp.concatenate([values.reshape(*lead, layout.quantized_dim), rope], axis=-1)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent of a normal number, from its bits: `exp2` may be off by some steps."""
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


@dataclasses.dataclass(frozen=True)
class AppendStatic:
    """Static arguments of `append_mla_cache`."""

    format: str
    page_size: int


def _append_reference(operands, static: AppendStatic):
    cache, kv, slots = operands["cache"], operands["kv"], operands["slots"]
    block, offset = cache_writer.locate(slots, cache.shape[0], static.page_size)
    if static.format == "bf16":
        tokens = jax.lax.bitcast_convert_type(_bf16(kv), cache.dtype)
        return (cache.at[block, offset, 0].set(tokens, mode="drop"),)
    if cache.dtype == jnp.float8_e4m3fn:  # which a CPU would scatter as float16
        operands = operands | {"cache": jax.lax.bitcast_convert_type(cache, jnp.uint8)}
        (out,) = _append_reference(operands, static)
        return (jax.lax.bitcast_convert_type(out, cache.dtype),)
    layout = FORMATS[static.format]
    rows, scales = quantize(kv, layout)
    cache = _write(cache, block, offset * layout.row_bytes, rows)
    if layout.scale_bytes:
        first = static.page_size * layout.row_bytes
        cache = _write(cache, block, first + offset * layout.scale_bytes, scales)
    return (cache,)


def _write(cache, block, first_byte, data):
    """Writes data uint8 [N, n] into blocks, from a byte of each on."""
    byte = first_byte[:, None] + jnp.arange(data.shape[1], dtype=jnp.int32)[None]
    return cache_writer.write(cache, block, byte, data)


def _append_native(operands, static: AppendStatic):
    cache = operands["cache"]
    out = jax.ffi.ffi_call(
        native.APPEND_MLA,
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={0: 0},
    )(
        cache,
        operands["kv"],
        operands["slots"],
        format=static.format,
        page_size=np.int64(static.page_size),
    )
    return (out,)


def _append_fold(size, operands, mapped, static):
    folded = cache_writer.fold(size, operands, mapped, page_size=static.page_size, updates=["kv"])
    return {name: folded[name] for name in operands}, static


append = Operator(
    "append_mla_cache",
    reference=_append_reference,
    outputs=lambda operands, static: (Output(operands["cache"].shape, operands["cache"].dtype),),
    fold=_append_fold,
    empty=lambda operands, static: False,
    cost=lambda operands, static: {"flops": 0, "bytes_accessed": 0},
    instead="plain jax.numpy indexing",
    handler=Handler(native.APPEND_MLA, _append_native),
)
