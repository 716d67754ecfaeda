"""Random calls of `sparse_mla_decode` and the check against the oracle.

A call is a dict of keyword arguments with NumPy arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn import sparse_mla_decode
from tests.sparse_mla.oracle import (
    BF16,
    HEAD_DIM,
    TOKEN_BYTES,
    pack_oracle,
    sparse_mla_oracle,
)
from tests.tolerances import MLA, assert_lse_close, assert_mla_out_close

Call = dict[str, Any]
FORMATS = ("v32", "model1", "bf16")
ALIGNMENT = {"v32": 16, "model1": 8}
POISON = 0xFF  # NaN as e4m3, as e8m0, and in fours and twos as f32 and bf16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call; the defaults are small, and no two axes are alike.

    Attributes:
        padded: Blocks of a cache have bytes behind their tokens.
        key_size: Half the largest standard deviation of parts of a key.
        extra_topk: Listed tokens of an extra cache, None without one.
    """

    batch: int = 2
    seqlen_q: int = 3
    heads: int = 4
    topk: int = 7
    format: str = "v32"
    page_size: int = 3
    num_blocks: int = 4
    padded: bool = False
    extra_topk: int | None = None
    extra_page_size: int = 5
    extra_num_blocks: int = 2
    head_dim: int | None = None  # of a bf16 cache
    key_size: float = 1.0

    @property
    def dqk(self) -> int:
        return HEAD_DIM.get(self.format) or self.head_dim or 576


def shape_of(row: dict, *, tokens: int = 40, **more) -> Shape:
    """The shape that a row of a covering set describes, with room for so many tokens.

    A row's cache is a format and its form: "v32 padded", "bf16 512".
    """
    format, _, form = row["cache"].partition(" ")
    return Shape(
        batch=row["batch"],
        seqlen_q=row["seqlen_q"],
        heads=row["heads"],
        topk=row["topk"],
        format=format,
        page_size=row["page_size"],
        num_blocks=1 + tokens // row["page_size"],
        padded=form == "padded",
        extra_topk=row["extra"],
        extra_page_size=row["extra_page_size"],
        head_dim=int(form) if format == "bf16" else None,
        **more,
    )


def random_cache(
    rng: np.random.Generator,
    format: str,
    num_blocks: int,
    page_size: int,
    padded: bool,
    dqk: int,
    key_size: float = 1.0,
) -> np.ndarray:
    """A cache of normal numbers in unequal sizes, so that scales differ; padding is poison."""
    size = key_size * 2.0 ** rng.integers(-2, 2, (num_blocks, page_size, 1, dqk // 64))
    keys = rng.standard_normal((num_blocks, page_size, 1, dqk)) * np.repeat(size, 64, axis=-1)
    if format == "bf16":
        return keys.astype(BF16)
    block_bytes = page_size * TOKEN_BYTES[format]
    if not padded:
        return pack_oracle(keys, format).copy() if keys.size else _no_tokens(keys, format)
    align = ALIGNMENT[format]
    cache = np.full((num_blocks, -(-block_bytes // align) * align + 2 * align), POISON, np.uint8)
    if num_blocks:
        cache[:, :block_bytes] = pack_oracle(keys, format).reshape(num_blocks, block_bytes)
    return cache


def _no_tokens(keys, format):
    return np.zeros((*keys.shape[:3], TOKEN_BYTES[format]), np.uint8)


def make_call(shape: Shape, seed: int = 0, **more: Any) -> Call:
    """A call with normal queries and every index valid."""
    rng = np.random.default_rng(seed)
    s = shape
    lead = (s.batch, s.seqlen_q)
    call: Call = {
        "q": rng.standard_normal((*lead, s.heads, s.dqk)).astype(BF16),
        "kv_cache": random_cache(
            rng, s.format, s.num_blocks, s.page_size, s.padded, s.dqk, s.key_size
        ),
        "indices": _slots(rng, (*lead, s.topk), s.num_blocks * s.page_size),
    }
    if s.padded:
        call["page_size"] = s.page_size
    if s.extra_topk is not None:
        sizes = (s.extra_num_blocks, s.extra_page_size, s.padded, s.dqk, s.key_size)
        call["extra_kv_cache"] = random_cache(rng, s.format, *sizes)
        slots = s.extra_num_blocks * s.extra_page_size
        call["extra_indices"] = _slots(rng, (*lead, s.extra_topk), slots)
        if s.padded:
            call["extra_page_size"] = s.extra_page_size
    return call | more


def _slots(rng, shape, count):
    return rng.integers(0, max(count, 1), shape).astype(np.int32)


def listed(call: Call, prefix: str = "") -> set[int]:
    """The slots that a call attends to."""
    indices, lengths = call[f"{prefix}indices"], call.get(f"{prefix}topk_length")
    if lengths is not None:
        lengths = np.asarray(lengths).reshape(*np.shape(lengths), *(1,) * (3 - np.ndim(lengths)))
        indices = np.where(np.arange(indices.shape[-1]) < lengths, indices, -1)
    return set(indices.ravel().tolist())


def token_places(format: str, slot: int, page_size: int) -> tuple[int, np.ndarray]:
    """The block of a slot, and where in it the bytes of its token are."""
    block, offset = divmod(slot, page_size)
    if format == "v32":
        return block, 656 * offset + np.arange(656)
    row, scales = 576 * offset, 576 * page_size + 8 * offset
    return block, np.concatenate([row + np.arange(576), scales + np.arange(8)])


def fill_unused(call: Call, filler: int, prefix: str = "") -> Call:
    """A call with every byte that it does not attend to set to a filler."""
    cache, used = call[f"{prefix}kv_cache"], listed(call, prefix)
    page_size = call.get(f"{prefix}page_size") or cache.shape[1]
    if cache.dtype == BF16:
        filled = np.full(2 * cache.size, filler, np.uint8).view(BF16).reshape(cache.shape)
        for slot in used & set(range(len(cache) * page_size)):
            filled[divmod(slot, page_size)] = cache[divmod(slot, page_size)]
        return call | {f"{prefix}kv_cache": filled}
    flat = cache.reshape(len(cache), -1).view(np.uint8)
    filled = np.full_like(flat, filler)
    format = "v32" if call["q"].shape[-1] == 576 else "model1"
    for slot in used & set(range(len(cache) * page_size)):
        block, places = token_places(format, slot, page_size)
        filled[block, places] = flat[block, places]
    return call | {f"{prefix}kv_cache": filled.view(cache.dtype).reshape(cache.shape)}


STATIC = ("page_size", "extra_page_size", "implementation", "plan")


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]):
    return jax.jit(functools.partial(sparse_mla_decode, return_lse=True, **dict(static)))


def run(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Calls the operator, jitted: (out, lse). Python numbers are static."""
    static = {n: x for n, x in call.items() if n in STATIC or isinstance(x, (int, float))}
    traced = {name: x for name, x in call.items() if name not in static}
    out, lse = _jitted(tuple(static.items()))(**traced)
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    return np.asarray(out), np.asarray(lse)


def expected(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """What the oracle says of a call: (out, lse)."""
    skipped = ("implementation", "plan", "schedule")
    return sparse_mla_oracle(**{n: x for n, x in call.items() if n not in skipped})


def assert_same_as(result, want, tolerance=MLA) -> None:
    """Requires (out, lse) to be within tolerance of another (out, lse)."""
    assert_mla_out_close(result[0], want[0])
    assert_lse_close(result[1], want[1], tolerance)


def check(call: Call, result=None) -> None:
    """Requires a call's result (by default that of `run`) to be what the oracle says."""
    assert_same_as(run(call) if result is None else result, expected(call))


def assert_same_bits(result, want) -> None:
    """Requires (out, lse) to be bit for bit another (out, lse)."""
    for got, other in zip(result, want, strict=True):
        got, other = np.asarray(got), np.asarray(other)
        assert got.dtype == other.dtype
        np.testing.assert_array_equal(got.view(np.uint8), other.view(np.uint8))
