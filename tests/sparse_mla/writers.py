"""Keys of any floats at all, and both implementations of the cache writers on them."""

from __future__ import annotations

import functools

import jax
import numpy as np

from jax_beam_attn.sparse_mla.cache import AppendStatic, append
from jax_beam_attn.sparse_mla.schedule import ScheduleStatic, schedule

# Bits of floats: everything, subnormals, the largest, and numbers whose quotient is near a tie.
KINDS = ("normal", "any bits", "subnormal", "huge", "ties", "zero", "one infinity", "one NaN")


def keys_of(kind: str, seed: int, count: int, head_dim: int, dtype) -> np.ndarray:
    """Keys [count, head_dim] of a kind."""
    rng = np.random.default_rng(seed)
    shape = (count, head_dim)
    signs = rng.choice(np.array([-1, 1], np.float32), shape)
    if kind == "any bits":
        width = np.dtype(dtype).itemsize
        unsigned = {2: np.uint16, 4: np.uint32}[width]
        return rng.integers(0, 2 ** (8 * width), shape, unsigned).view(dtype)
    if kind == "subnormal":
        keys = rng.integers(0, 2**23, shape, np.uint32).view(np.float32) * signs
    elif kind == "huge":
        keys = signs * np.finfo(np.float32).max * rng.uniform(0.4, 1, shape)
    elif kind == "ties":
        # With an amax of 448 the quotients are the elements, but for the rounding of the scale.
        middles = (2 * rng.integers(0, 8, shape) + 17) * 2.0 ** rng.integers(-14, 4, shape)
        keys = np.minimum(middles, 448) * signs
        keys[:, ::64] = 448.0 * 2.0 ** rng.integers(-1, 1, (count, 1))
    else:
        sizes = 2.0 ** rng.integers(-20, 20, (count, 1))
        keys = rng.standard_normal(shape) * sizes * (kind != "zero")
    if kind.startswith("one ") and count:
        places = rng.integers(0, head_dim, count)
        value = np.inf if kind == "one infinity" else np.nan
        keys[np.arange(count), places] = value * signs[:, 0]
    return keys.astype(np.float32).astype(dtype)


@functools.cache
def _append(static: AppendStatic, implementation: str):
    def run(cache, kv, slots):
        operands = {"cache": cache, "kv": kv, "slots": slots}
        return append(operands, static, implementation=implementation)[0]

    return jax.jit(run)


def assert_append_equal(cache, keys, slots, format: str, page_size: int) -> np.ndarray:
    """Requires the native handler to write the bytes of the reference; returns them."""
    static = AppendStatic(format, page_size)
    got, want = (
        np.asarray(_append(static, each)(cache, keys, slots)) for each in ("native", "reference")
    )
    assert (got.dtype, got.shape) == (want.dtype, want.shape) == (cache.dtype, cache.shape)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
    return got


@functools.cache
def _schedule(static: ScheduleStatic, implementation: str):
    return jax.jit(functools.partial(schedule, static=static, implementation=implementation))


def assert_schedule_equal(lengths: dict[str, np.ndarray], static: ScheduleStatic) -> None:
    """Requires the native handler to cut as the reference does; lengths are [G, B(, Sq)]."""
    got, want = (_schedule(static, each)(lengths) for each in ("native", "reference"))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype == np.int32
        np.testing.assert_array_equal(ours, theirs)
