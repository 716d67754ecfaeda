"""Random calls of `turboquant_attention` and the check against the oracle.

A call is a dict of keyword arguments with NumPy arrays. Without `query_start_loc` it is one of
`turboquant_decode_attention`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn import (
    TurboQuantFormat,
    lloyd_max_centroids,
    turboquant_attention,
    turboquant_decode_attention,
)
from tests.tolerances import TOLERANCES, assert_lse_close, assert_out_close
from tests.turboquant import oracle

Call = dict[str, Any]
POISON = 0xFF  # NaN as e4m3 and, in pairs, as fp16
STATIC = (
    "format",
    "sliding_window",
    "logits_soft_cap",
    "max_query_len",
    "max_seq_len",
    "implementation",
    "plan",
)
PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
FREE = [(key, value, nc) for key in (3, 4, 8) for value in (3, 4) for nc in (False, True)]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call; the defaults are small, and no two axes are alike.

    Attributes:
        lengths: Cached tokens of each request.
        queries: New tokens of each request, None for one each and the decode function.
        spare: Tokens of no request, before the first and behind the last.
    """

    lengths: tuple[int, ...] = (11, 5, 7)
    queries: tuple[int, ...] | None = (2, 1, 4)
    spare: tuple[int, int] = (0, 0)
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 3
    num_blocks: int = 17
    key_bits: int = 4
    value_bits: int = 4
    norm_correction: bool = True
    dtype: str = "float32"

    @property
    def format(self) -> TurboQuantFormat:
        return TurboQuantFormat(
            self.head_dim,
            self.kv_heads,
            self.block_size,
            self.key_bits,
            self.value_bits,
            self.norm_correction,
        )


def random_rotation(head_dim: int, seed: int = 0) -> np.ndarray:
    """Any orthogonal matrix: neither symmetric nor its own inverse."""
    matrix = np.random.default_rng(seed).standard_normal((head_dim, head_dim))
    return np.linalg.qr(matrix)[0].astype(np.float32)


def random_centroids(bits: int, head_dim: int, seed: int = 0) -> np.ndarray:
    """An ascending codebook without symmetry."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.standard_normal(2**bits) / head_dim**0.5).astype(np.float32)


def codebook(format: TurboQuantFormat, seed: int | None = None) -> Call:
    """Rotation and centroids: any, or with a seed of None the usual codebook."""
    if format.key_bits == 8:
        return {"rotation": None, "centroids": None}
    centroids = (
        np.asarray(lloyd_max_centroids(format.key_bits, format.head_dim))
        if seed is None
        else random_centroids(format.key_bits, format.head_dim, seed)
    )
    return {"rotation": random_rotation(format.head_dim, seed or 0), "centroids": centroids}


def random_cache(format: TurboQuantFormat, num_blocks: int, seed: int = 0) -> np.ndarray:
    """A cache of random codes, with norms of about sqrt(D) and values of about 1."""
    rng = np.random.default_rng(seed)
    sizes = (format.num_kv_heads, format.block_size)
    scale = rng.uniform(0.2, 0.4, (num_blocks, *sizes))
    zero = -scale * (2**format.value_bits - 1) / 2 + rng.uniform(-0.5, 0.5, scale.shape)
    fields = [scale, zero]
    if format.key_bits != 8:
        fields.insert(0, rng.uniform(0.5, 1.5, scale.shape) * format.head_dim**0.5)
    metadata = np.stack(fields, axis=2).astype(np.float16)
    data = rng.integers(0, 256, (num_blocks, format.metadata_start), dtype=np.uint8)
    if format.key_bits == 8:  # keys of about 1
        key_bytes, value_bytes, *_ = oracle.sizes(format)
        rows = data.reshape(num_blocks, -1, key_bytes + value_bytes)
        keys = rng.standard_normal((*rows.shape[:2], key_bytes))
        rows[..., :key_bytes] = keys.astype(oracle.E4M3).view(np.uint8)
    used = np.concatenate([data, metadata.view(np.uint8).reshape(num_blocks, -1)], axis=1)
    padding = np.full((num_blocks, format.block_bytes - used.shape[1]), POISON, np.uint8)
    return np.concatenate([used, padding], axis=1).reshape(format.cache_shape(num_blocks))


def make_call(shape: Shape, seed: int = 0, **more: Any) -> Call:
    """A call whose requests have blocks in random order; nothing is shared between them."""
    rng = np.random.default_rng(seed)
    format = shape.format
    requests = len(shape.lengths)
    queries = shape.queries or (1,) * requests
    first, last = shape.spare
    tokens = first + sum(queries) + last
    dtype = jnp.dtype(shape.dtype)
    max_blocks = max(1, -(-max(shape.lengths, default=0) // shape.block_size))
    assert requests * max_blocks <= shape.num_blocks, "num_blocks is too small"
    blocks = rng.permutation(shape.num_blocks)[: requests * max_blocks]
    call: Call = {
        "query": rng.standard_normal((tokens, shape.heads, shape.head_dim)).astype(dtype),
        "kv_cache": random_cache(format, shape.num_blocks, seed),
        "block_table": blocks.reshape(requests, max_blocks).astype(np.int32),
        "seq_lens": np.array(shape.lengths, np.int32),
        "format": format,
        **codebook(format, seed),
    }
    if shape.queries is not None:
        call["query_start_loc"] = (first + np.cumsum([0, *queries])).astype(np.int32)
    return call | more


def fill_unused(call: Call, filler: int) -> Call:
    """A call with every byte of the cache that it does not attend to set to a filler."""
    format, cache = call["format"], call["kv_cache"]
    flat = cache.reshape(len(cache), -1)
    filled = np.full_like(flat, filler)
    for table, length in zip(call["block_table"], call["seq_lens"], strict=True):
        for position in range(min(max(int(length), 0), len(table) * format.block_size)):
            block, offset = table[position // format.block_size], position % format.block_size
            if 0 <= block < len(cache):
                places = oracle.token_places(format, offset)
                filled[block, places] = flat[block, places]
    return call | {"kv_cache": filled.reshape(cache.shape)}


def function_of(call: Call):
    """The operator with the static arguments of a call, a function of its arrays."""
    static = {n: x for n, x in call.items() if n in STATIC or isinstance(x, (int, float))}
    function = turboquant_attention if "query_start_loc" in call else turboquant_decode_attention
    return functools.partial(function, return_lse=True, **static)


def arrays_of(call: Call) -> Call:
    return {n: x for n, x in call.items() if not (n in STATIC or isinstance(x, (int, float)))}


@functools.cache
def _jitted(decode: bool, static: tuple[tuple[str, Any], ...]):
    function = turboquant_decode_attention if decode else turboquant_attention
    return jax.jit(functools.partial(function, return_lse=True, **dict(static)))


def run(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Calls the operator, jitted: (out, lse). Python numbers are static."""
    traced = arrays_of(call)
    static = tuple((name, x) for name, x in call.items() if name not in traced)
    out, lse = _jitted("query_start_loc" not in call, static)(**traced)
    assert (out.dtype, lse.dtype) == (call["query"].dtype, jnp.float32)
    return np.asarray(out), np.asarray(lse)


def expected(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """What the oracle says of a call: (out, lse)."""
    skipped = ("implementation", "plan", "max_query_len", "max_seq_len")
    return oracle.attention(**{n: x for n, x in call.items() if n not in skipped})


def assert_same_as(result, want, dtype="float32") -> None:
    """Requires (out, lse) to be within tolerance of another (out, lse)."""
    tolerance = TOLERANCES[jnp.dtype(dtype)]
    assert_out_close(result[0], want[0], tolerance)
    assert_lse_close(result[1], want[1], tolerance)


def check(call: Call, result=None) -> None:
    """Requires a call's result (by default that of `run`) to be what the oracle says."""
    result = run(call) if result is None else result
    assert_same_as(result, expected(call), call["query"].dtype)


def assert_same_bits(result, want) -> None:
    """Requires (out, lse) to be bit for bit another (out, lse)."""
    for got, other in zip(result, want, strict=True):
        got, other = np.asarray(got), np.asarray(other)
        assert got.dtype == other.dtype
        np.testing.assert_array_equal(got.view(np.uint8), other.view(np.uint8))
