"""Random calls of `beam_decode_attn`, their other forms, and the check against the oracle.

A call is a dict of keyword arguments with NumPy arrays. `dense_call` makes one in dense form;
`jagged` and `paged` restate it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.oracle import beam_decode_oracle
from tests.tolerances import TOLERANCES, assert_lse_close, assert_out_close

Call = dict[str, Any]

CONTEXT = ("k_context", "v_context")
CACHES = (*CONTEXT, "k_beam", "v_beam")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a call; the defaults are small, and no two axes are alike."""

    batch: int = 2
    width: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    context: int = 5
    beam_rows: int = 7
    steps: int = 6
    index_heads: int = 1


def dense_call(shape: Shape, dtype: Any = "float32", seed: int = 0, **more: Any) -> Call:
    """A call in dense form with normal numbers, every step decoded and every index valid."""
    rng = np.random.default_rng(seed)

    def normal(*sizes):
        return rng.standard_normal(sizes).astype(jnp.dtype(dtype))

    s = shape
    context = (s.batch, s.context, s.kv_heads, s.head_dim)
    beam = (s.batch, s.beam_rows, s.kv_heads, s.head_dim)
    indices = rng.integers(
        0, max(s.beam_rows, 1), (s.batch, 1, s.index_heads, s.steps, s.width), np.int32
    )
    return {
        "q": normal(s.batch, 1, s.width, s.heads, s.head_dim),
        "k_context": normal(*context),
        "v_context": normal(*context),
        "k_beam": normal(*beam),
        "v_beam": normal(*beam),
        "topk_indices": indices,
        "decode_nums": np.int32(s.steps),
    } | more


def lengths_of(call: Call) -> np.ndarray:
    """The valid lengths of a dense call, int [B], as the interface clamps them."""
    batch, capacity = call["k_context"].shape[:2]
    lengths = call.get("seqused_k", np.full(batch, capacity, np.int32))
    return np.clip(lengths, 0, capacity)


def jagged(call: Call, filler: float = np.nan, margin: int = 2) -> Call:
    """A dense call in jagged form.

    Filler lies in `margin` rows before the samples, and in rows after them until the total is
    the same for all lengths, so that one compilation serves them.
    """
    call = dict(call)
    lengths = lengths_of(call)
    capacity = call["k_context"].shape[1]
    call.pop("seqused_k", None)
    bounds = margin + np.append(0, np.cumsum(lengths))
    total = len(lengths) * capacity + 2 * margin
    for name in CONTEXT:
        dense = call[name]
        call[name] = np.full((total, *dense.shape[2:]), filler, dense.dtype)
        for b, length in enumerate(lengths):
            call[name][bounds[b] : bounds[b + 1]] = dense[b, :length]
    return call | {"cu_seqlens_k": bounds.astype(np.int32)}


def paged(
    call: Call, page_size: int, seed: int = 0, filler: float = np.nan, spare_pages: int = 2
) -> Call:
    """A dense call in paged form: shuffled pages, filler in page tails and in unused pages."""
    call = dict(call)
    lengths = lengths_of(call)
    batch, capacity = call["k_context"].shape[:2]
    max_pages = -(-capacity // page_size)
    num_pages = batch * max_pages + spare_pages
    order = np.random.default_rng(seed).permutation(num_pages)[: batch * max_pages]
    tables = order.reshape(batch, max_pages).astype(np.int32)
    for name in CONTEXT:
        dense = call[name]
        pool = np.full((num_pages, page_size, *dense.shape[2:]), filler, dense.dtype)
        for b, length in enumerate(lengths):
            for token in range(length):
                pool[tables[b, token // page_size], token % page_size] = dense[b, token]
        call[name] = pool
    return call | {"block_tables": tables, "seqused_k": lengths.astype(np.int32)}


def fill_unused(call: Call, filler: float) -> Call:
    """A dense call with filler past the lengths and in beam rows that no valid step names."""
    call = {name: np.array(x) if name in CACHES else x for name, x in call.items()}
    decoded = np.broadcast_to(call["decode_nums"], lengths_of(call).shape)
    for b, length in enumerate(lengths_of(call)):
        used = call["topk_indices"][b, 0, :, : max(int(decoded[b]), 0)]
        unused = np.setdiff1d(np.arange(call["k_beam"].shape[1]), used)
        for name in CONTEXT:
            call[name][b, length:] = filler
        for name in ("k_beam", "v_beam"):
            call[name][b, unused] = filler
    return call


@functools.cache
def _jitted(static: tuple[tuple[str, Any], ...]):
    return jax.jit(functools.partial(beam_decode_attn, return_lse=True, **dict(static)))


def run(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """Calls the operator, jitted: (out, lse). Python numbers but decode_nums are static."""
    static = tuple(
        (name, x) for name, x in call.items() if not hasattr(x, "shape") and name != "decode_nums"
    )
    traced = {name: x for name, x in call.items() if name not in dict(static)}
    out, lse = _jitted(static)(**traced)
    assert (out.dtype, lse.dtype) == (call["q"].dtype, jnp.float32)
    return np.asarray(out), np.asarray(lse)


def expected(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """What the oracle says of a call: (out, lse)."""
    mathematics = {n: x for n, x in call.items() if n not in ("implementation", "plan")}
    return beam_decode_oracle(**mathematics)


def assert_same_as(result, want, tolerance) -> None:
    """Requires (out, lse) to be within tolerance of another (out, lse)."""
    assert_out_close(result[0], want[0], tolerance)
    assert_lse_close(result[1], want[1], tolerance)


def check(call: Call, result=None) -> None:
    """Requires a call's result (by default that of `run`) to be what the oracle says."""
    tolerance = TOLERANCES[jnp.dtype(call["q"].dtype)]
    assert_same_as(run(call) if result is None else result, expected(call), tolerance)


def assert_same_bits(result, want) -> None:
    """Requires (out, lse) to be bit for bit another (out, lse)."""
    for got, other in zip(result, want, strict=True):
        assert got.dtype == other.dtype
        np.testing.assert_array_equal(got, other)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(other))
