"""The cache format: its bytes, writing tokens into it, and dequantising it.

A cache is uint8 [num_blocks, block_size, Hkv, slot_bytes]; a token's slot is
block * block_size + offset. Within the bytes of a block ("structure of arrays"):

    data      [block_size][Hkv][KD key bytes | VD value bytes]
    metadata  16-bit floats [Hkv][F][block_size], F = (k_norm, v_scale, v_zero)

FP8 keys have no k_norm. Bytes behind the metadata are padding, never read or written.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn._core import availability, cache_writer, checks, folding, native
from jax_beam_attn._core.handler import Handler
from jax_beam_attn._core.operator import Implementation, Operator, Output

_F16_MAX = 65504.0
_E4M3_MAX = 448.0
_MAX_HEAD_DIM = 256
# name: (key_bits, value_bits, norm_correction)
_PRESETS = {
    "k8v4": (8, 4, False),
    "4bit_nc": (4, 4, True),
    "k3v4_nc": (3, 4, True),
    "3bit_nc": (3, 3, True),
}


@dataclasses.dataclass(frozen=True)
class TurboQuantFormat:
    """How keys and values are stored; hashable, a static argument.

    Attributes:
        head_dim: D, a multiple of 8 up to 256.
        num_kv_heads: Hkv.
        block_size: Tokens of a block.
        key_bits: 3 or 4: indices into a codebook of the rotated key's coordinates; 8: FP8 (e4m3)
            of the key itself.
        value_bits: 3 or 4, uniform between each value's extremes.
        norm_correction: The stored norm makes up for the codebook's error in length. Without
            effect on FP8 keys.
        layout: "soa".

    Raises:
        ValueError: For a value that is not listed.
        TypeError: For one of the wrong type.

    Source: the caches of vLLM's TurboQuant backend with SoA metadata, byte for byte.

    Example:
        >>> sizes = {"head_dim": 128, "num_kv_heads": 8, "block_size": 16}
        >>> TurboQuantFormat.preset("4bit_nc", **sizes).slot_bytes
        134
    """

    head_dim: int
    num_kv_heads: int
    block_size: int
    key_bits: int
    value_bits: int
    norm_correction: bool
    layout: str = "soa"

    def __post_init__(self):
        checks.at_least_one("head_dim", self.head_dim)
        checks.multiple_of("head_dim", self.head_dim, "the required divisor", 8)
        if self.head_dim > _MAX_HEAD_DIM:
            raise ValueError(f"head_dim: got {self.head_dim}, expected at most {_MAX_HEAD_DIM}")
        checks.at_least_one("num_kv_heads", self.num_kv_heads)
        checks.at_least_one("block_size", self.block_size)
        checks.one_of("key_bits", self.key_bits, (3, 4, 8))
        checks.one_of("value_bits", self.value_bits, (3, 4))
        checks.one_of("norm_correction", self.norm_correction, (False, True))
        checks.one_of("layout", self.layout, ("soa",))

    @classmethod
    def preset(
        cls, name: str, *, head_dim: int, num_kv_heads: int, block_size: int
    ) -> TurboQuantFormat:
        """One of vLLM's formats: "k8v4", "4bit_nc", "k3v4_nc" or "3bit_nc"."""
        checks.one_of("name", name, tuple(_PRESETS))
        return cls(head_dim, num_kv_heads, block_size, *_PRESETS[name])

    @property
    def key_is_fp8(self) -> bool:
        """Whether keys are e4m3, neither rotated nor scaled."""
        return self.key_bits == 8

    @property
    def key_bytes(self) -> int:
        """KD, bytes of a token's key in one head."""
        return self.head_dim * self.key_bits // 8

    @property
    def value_bytes(self) -> int:
        """VD, bytes of a token's value in one head."""
        return self.head_dim * self.value_bits // 8

    @property
    def num_fields(self) -> int:
        """F, 16-bit floats of a token in one head."""
        return 2 if self.key_is_fp8 else 3

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token in one head: data and metadata, rounded up to even."""
        exact = self.key_bytes + self.value_bytes + 2 * self.num_fields
        return exact + exact % 2

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.block_size * self.num_kv_heads * self.slot_bytes

    @property
    def metadata_start(self) -> int:
        """The byte of a block where its metadata begins."""
        return self.block_size * self.num_kv_heads * (self.key_bytes + self.value_bytes)

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int]:
        """The shape of a cache."""
        return num_blocks, self.block_size, self.num_kv_heads, self.slot_bytes


def check_format(format: object) -> None:
    """Requires a `TurboQuantFormat`."""
    if not isinstance(format, TurboQuantFormat):
        raise TypeError(f"format: got {type(format).__name__}, expected TurboQuantFormat")


def check_cache(cache: jax.Array, format: TurboQuantFormat) -> None:
    """Requires a cache of a format."""
    checks.dtype("kv_cache", cache, (jnp.uint8,))
    checks.shape("kv_cache", cache, format.cache_shape("num_blocks"))  # pyright: ignore
    if cache.shape[0] * format.block_size > jnp.iinfo(jnp.int32).max:
        raise ValueError(
            f"kv_cache: got {cache.shape[0]} blocks of {format.block_size} tokens, expected less "
            "than 2**31 slots"
        )


def check_codebook(
    rotation: jax.Array | None, centroids: jax.Array | None, format: TurboQuantFormat
) -> dict[str, jax.Array]:
    """Rotation and centroids as operands f32 [1, D, D] and [1, C]; none for FP8 keys."""
    if format.key_is_fp8:
        return {}
    for name, array in (("rotation", rotation), ("centroids", centroids)):
        if array is None:
            raise ValueError(f"{name}: got None, expected an array with key_bits < 8")
    return {
        "rotation": checks.float32("rotation", rotation, (format.head_dim, format.head_dim))[None],
        "centroids": checks.float32("centroids", centroids, (2**format.key_bits,))[None],
    }


def turboquant_store(
    kv_cache: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slot_mapping: jax.Array,
    *,
    format: TurboQuantFormat,
    rotation: jax.Array | None,
    centroids: jax.Array | None,
) -> jax.Array:
    """Quantises keys and values and writes them into their slots.

    In place when the cache is donated: `jax.jit(turboquant_store, donate_argnums=0, ...)`. What
    16-bit floats cannot hold saturates, so that finite input has finite results.

    Args:
        kv_cache: uint8 [num_blocks, block_size, Hkv, slot_bytes].
        key: [N, Hkv, D], bf16, fp16 or f32.
        value: [N, Hkv, D], likewise.
        slot_mapping: int [N]; a slot outside the cache, -1 say, writes nothing. Which of two
            equal slots wins is not specified.
        format: The cache's format.
        rotation: Any orthogonal matrix f32 [D, D]; ignored for FP8 keys.
        centroids: Any ascending codebook f32 [2**key_bits]; ignored for FP8 keys.

    Returns:
        The cache with the tokens written.

    Raises:
        ValueError: For a wrong shape; under vmap with mapped updates of one shared cache.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated.

    Source: `turboquant_soa` of vLLM.

    Example:
        >>> from jax_beam_attn import hadamard_rotation, lloyd_max_centroids
        >>> format = TurboQuantFormat.preset("4bit_nc", head_dim=64, num_kv_heads=1, block_size=16)
        >>> codebook = {"rotation": hadamard_rotation(64), "centroids": lloyd_max_centroids(4, 64)}
        >>> key = value = jax.random.normal(jax.random.key(0), (1, 1, 64))
        >>> cache = jnp.zeros(format.cache_shape(2), jnp.uint8)
        >>> slots = jnp.array([17])
        >>> cache = turboquant_store(cache, key, value, slots, format=format, **codebook)
        >>> _, v = turboquant_dequantize(cache, format=format, centroids=codebook["centroids"])
        >>> bool(jnp.abs(v[1, 1] - value[0]).max() < 0.2)
        True
    """
    check_format(format)
    check_cache(kv_cache, format)
    for name, array in (("key", key), ("value", value)):
        checks.dtype(name, array, (jnp.bfloat16, jnp.float16, jnp.float32))
        checks.shape(name, array, ("N", format.num_kv_heads, format.head_dim))
    checks.shape("value", value, key.shape)
    slots = checks.int32("slot_mapping", slot_mapping)
    checks.shape("slot_mapping", slots, (key.shape[0],))
    codebook = check_codebook(rotation, centroids, format)
    (out,) = store(
        {"cache": kv_cache, "key": key, "value": value, "slots": slots} | codebook, format
    )
    return out


def turboquant_dequantize(
    kv_cache: jax.Array, *, format: TurboQuantFormat, centroids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Dequantises a whole cache.

    Args:
        kv_cache: uint8 [num_blocks, block_size, Hkv, slot_bytes].
        format: The cache's format.
        centroids: f32 [2**key_bits]; ignored for FP8 keys.

    Returns:
        Keys as they are stored, that is rotated (but for FP8 keys), and values, f32
        [num_blocks, block_size, Hkv, D] each.

    Raises:
        ValueError: For a wrong shape.
        TypeError: For a wrong dtype.

    Example:
        >>> format = TurboQuantFormat.preset("k8v4", head_dim=64, num_kv_heads=2, block_size=16)
        >>> cache = jnp.zeros(format.cache_shape(3), jnp.uint8)
        >>> k, v = turboquant_dequantize(cache, format=format, centroids=None)
        >>> k.shape, float(v.max())
        ((3, 16, 2, 64), 0.0)
    """
    check_format(format)
    check_cache(kv_cache, format)
    if not format.key_is_fp8:
        identity = jnp.zeros((format.head_dim, format.head_dim))
        centroids = check_codebook(identity, centroids, format)["centroids"][0]
    return dequantize(kv_cache, format, centroids)


def dequantize(
    blocks: jax.Array, format: TurboQuantFormat, centroids: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Blocks uint8 [..., block_size, Hkv, slot_bytes] as keys and values f32 [..., bs, Hkv, D]."""
    lead, sizes = blocks.shape[:-3], (format.block_size, format.num_kv_heads)
    blocks = blocks.reshape(*lead, format.block_bytes)
    data = blocks[..., : format.metadata_start].reshape(*lead, *sizes, -1)
    key_bytes, value_bytes = data[..., : format.key_bytes], data[..., format.key_bytes :]
    end = format.metadata_start + 2 * format.num_fields * format.block_size * format.num_kv_heads
    metadata = cache_writer.from_bytes(blocks[..., format.metadata_start : end], jnp.float16)
    metadata = metadata.reshape(*lead, format.num_kv_heads, format.num_fields, format.block_size)
    # [Hkv, F, block_size] to F of [block_size, Hkv, 1].
    *norm, scale, zero = jnp.moveaxis(metadata, (-2, -1), (0, -2))[..., None].astype(jnp.float32)

    if format.key_is_fp8:
        key = jax.lax.bitcast_convert_type(key_bytes, jnp.float8_e4m3fn).astype(jnp.float32)
    else:
        assert centroids is not None
        key = centroids[_unpack(key_bytes, format.key_bits)] * norm[0]
    value = _unpack(value_bytes, format.value_bits).astype(jnp.float32) * scale + zero
    return key, value


def quantize_key(
    key: jax.Array, rotation: jax.Array, centroids: jax.Array, norm_correction: bool
) -> tuple[jax.Array, jax.Array]:
    """Keys f32 [R, N, Hkv, D] as indices i32, and norms fp16 [R, N, Hkv].

    Rotation and centroids have the leading axis R too, see `op.py`.
    """
    # Squares of what is far beyond any 16-bit norm would overflow; the plain formula otherwise.
    peak = jnp.max(jnp.abs(key), axis=-1, keepdims=True)
    unit = jnp.where(peak > 1e15, peak, 1.0)
    key = key / unit
    norm = jnp.sqrt(jnp.sum(key * key, axis=-1, keepdims=True))
    key = key / (norm + 1e-8 / unit)
    rotated = jnp.einsum("rnhi,rji->rnhj", key, rotation, precision="highest")
    midpoints = (centroids[:, 1:] + centroids[:, :-1]) / 2
    index = jnp.zeros(key.shape, jnp.int32)
    for level in range(midpoints.shape[1]):
        index += (rotated >= midpoints[:, level, None, None, None]).astype(jnp.int32)
    norm = norm * unit
    if norm_correction:
        chosen = jax.vmap(lambda table, i: table[i])(centroids, index)
        norm = norm / jnp.sqrt(jnp.sum(chosen * chosen, axis=-1, keepdims=True) + 1e-16)
    return index, jnp.minimum(norm[..., 0], _F16_MAX).astype(jnp.float16)


def quantize_value(value: jax.Array, bits: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Values f32 [..., D] as codes i32, scale and zero fp16 [...].

    A code is floor((value - zero) / scale + 1/2). Values of 16 bits are often half-way between two
    codes, so all writers do these very float32 operations, which compilers leave as they are: no
    division by what many elements share, which XLA turns into a multiplication, and no addition
    behind a multiplication, which may be fused with it.
    """
    top = 2**bits - 1
    low = jnp.clip(jnp.min(value, axis=-1, keepdims=True), -_F16_MAX, _F16_MAX)
    spread = jnp.max(value, axis=-1, keepdims=True) - low
    scale = jnp.clip(spread * np.float32(1 / top), 1e-8, _F16_MAX)
    halves = jnp.clip(jnp.floor((value - low) * (2 / scale)), 0, 2 * top).astype(jnp.int32)
    return (halves + 1) >> 1, scale[..., 0].astype(jnp.float16), low[..., 0].astype(jnp.float16)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Codes i32 [..., D] as uint8 [..., D * bits / 8]: code i begins at bit i * bits."""
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)
    wide = jnp.sum(groups.astype(jnp.uint32) << _shifts(bits, groups.ndim), -1, jnp.uint32)
    return cache_writer.to_bytes(wide[..., None])[..., :bits].reshape(*codes.shape[:-1], -1)


def _unpack(data: jax.Array, bits: int) -> jax.Array:
    """The inverse of `_pack`."""
    lead, count = data.shape[:-1], data.shape[-1] // bits
    groups = jnp.pad(data.reshape(*lead, count, bits), [(0, 0)] * (len(lead) + 1) + [(0, 4 - bits)])
    wide = cache_writer.from_bytes(groups, jnp.uint32)
    codes = (wide >> _shifts(bits, wide.ndim)) & jnp.uint32(2**bits - 1)
    return codes.astype(jnp.int32).reshape(*lead, 8 * count)


def _shifts(bits: int, rank: int) -> jax.Array:
    """Where each of eight codes begins, uint32 [1, ..., 1, 8]."""
    return (jnp.arange(8, dtype=jnp.uint32) * jnp.uint32(bits)).reshape(*[1] * (rank - 1), 8)


def _store_reference(operands, format: TurboQuantFormat):
    cache, slots = operands["cache"], operands["slots"]
    if not slots.size:
        return (cache,)
    block, offset = cache_writer.locate(slots, cache.shape[0], format.block_size)
    key, value = (operands[name].astype(jnp.float32) for name in ("key", "value"))
    code, scale, zero = quantize_value(value, format.value_bits)
    fields = [scale, zero]
    if format.key_is_fp8:
        key = jnp.clip(key, -_E4M3_MAX, _E4M3_MAX).astype(jnp.float8_e4m3fn)
        key_bytes = jax.lax.bitcast_convert_type(key, jnp.uint8)
    else:
        codebook = [operands[name] for name in ("rotation", "centroids")]
        groups = max(array.shape[0] for array in codebook)
        rotation, centroids = (folding.of_each(array, groups) for array in codebook)
        grouped = key.reshape(rotation.shape[0], -1, *key.shape[1:])
        index, norm = quantize_key(grouped, rotation, centroids, format.norm_correction)
        key_bytes = _pack(index.reshape(key.shape), format.key_bits)
        fields.insert(0, norm.reshape(scale.shape))
    data = jnp.concatenate([key_bytes, _pack(code, format.value_bits)], axis=-1)
    metadata = cache_writer.to_bytes(jnp.stack(fields, axis=-1)[..., None])  # [N, Hkv, F, 2]

    size = data[0].size
    byte = offset[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]
    cache = cache_writer.write(cache, block, byte, data.reshape(len(slots), -1))
    field = jnp.arange(format.num_kv_heads * format.num_fields, dtype=jnp.int32)
    number = field[None] * format.block_size + offset[:, None]
    byte = (
        format.metadata_start + 2 * number[..., None] + jnp.arange(2, dtype=jnp.int32)[None, None]
    )
    flat = (len(slots), -1)
    return (cache_writer.write(cache, block, byte.reshape(flat), metadata.reshape(flat)),)


def _store_native(operands, format: TurboQuantFormat):
    cache = operands["cache"]
    none = {"rotation": jnp.zeros((0, 0, 0)), "centroids": jnp.zeros((0, 0))}
    names = ("cache", "key", "value", "slots", "rotation", "centroids")
    out = jax.ffi.ffi_call(
        native.TURBOQUANT_STORE,
        jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={0: 0},
    )(
        *((none | operands)[name] for name in names),
        key_bits=np.int64(format.key_bits),
        value_bits=np.int64(format.value_bits),
        norm_correction=format.norm_correction,
    )
    return (out,)


def _store_fold(size, operands, mapped, format):
    folded = cache_writer.fold(
        size,
        operands,
        mapped,
        page_size=format.block_size,
        updates=["key", "value"],
        cache="kv_cache",
    )
    for name in ("rotation", "centroids"):
        if name in operands:
            folded[name] = folding.grouped(operands[name], name in mapped, size)
    return {name: folded[name] for name in operands}, format


# Operands: cache, key, value [N, Hkv, D], slots i32 [N], rotation f32 [R, D, D] and centroids
# f32 [R, C], each of the R for an equal share of the tokens in order; R > 1 under vmap.
store = Operator(
    "turboquant_store",
    reference=_store_reference,
    outputs=lambda operands, format: (Output(operands["cache"].shape, jnp.uint8),),
    fold=_store_fold,
    empty=lambda operands, format: False,
    cost=lambda operands, format: {"flops": 0, "bytes_accessed": 0},
    instead="plain jax.numpy indexing",
    handler=Handler(native.TURBOQUANT_STORE, _store_native),
)


def _unsupported_by_triton(operands, call):
    from jax_beam_attn.turboquant import store_triton

    return store_triton.unsupported(operands, call)


def _run_triton(operands, call):
    from jax_beam_attn.turboquant import store_triton

    return store_triton.run(operands, call)


store.implementations.append(
    Implementation("triton", availability.triton_unavailable, _unsupported_by_triton, _run_triton)
)
