"""The primitive of TurboQuant attention.

Operands, all in one canonical form whatever the caller's:

    q            [T, Hq, D], not rotated
    cache        uint8 [num_blocks, block_size, Hkv, slot_bytes]
    block_table  i32 [S, M]
    seq_lens     i32 [S]
    query_start  i32 [N, S/N + 1]: bounds of S/N requests in the T tokens; N > 1 under vmap.
                 Absent where T = S and every request has one token.
    rotation     f32 [R, D, D], absent for FP8 keys
    centroids    f32 [R, C], likewise
    sink         f32 [R, Hq], optional
    scale        f32 [R], absent where it is static

What has the leading axis R is for equal groups of requests, in order; R = 1 outside vmap.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_beam_attn._core import availability, folding
from jax_beam_attn._core.operator import Implementation, Operator, Output
from jax_beam_attn.turboquant.cache import TurboQuantFormat
from jax_beam_attn.turboquant.plan import triton_unsupported
from jax_beam_attn.turboquant.reference import turboquant_reference


@dataclasses.dataclass(frozen=True)
class TurboQuantStatic:
    """Static arguments.

    Attributes:
        format: The cache's.
        scale: Softmax scale, or None where it is an operand.
        soft_cap: Logit soft cap, or None.
        window: Keys that a query sees, itself included, or None.
        max_query_len: The most tokens of a request, as the caller says: for plans only.
        max_seq_len: The longest request, likewise.
    """

    format: TurboQuantFormat
    scale: float | None
    soft_cap: float | None
    window: int | None
    max_query_len: int
    max_seq_len: int


def _outputs(operands, static):
    q = operands["q"]
    return (
        Output(q.shape, q.dtype),
        Output(q.shape[:2], jnp.float32, empty=-jnp.inf),
    )


def _empty(operands, static) -> bool:
    return 0 in operands["block_table"].shape or 0 in operands["cache"].shape


def _cost(operands, static):
    q, cache = operands["q"], operands["cache"]
    tokens = operands["seq_lens"].size * static.max_seq_len
    tokens_per_request = q.shape[0] / max(operands["seq_lens"].size, 1)
    return {
        "flops": int(4 * q.shape[1] * q.shape[2] * tokens * tokens_per_request),
        "bytes_accessed": tokens * cache.shape[2] * cache.shape[3] + 2 * q.size * q.dtype.itemsize,
    }


def _fold(size, operands, mapped, static):
    tokens = operands["q"].shape[1 if "q" in mapped else 0]
    folded = {
        name: folding.batched(operands[name], name in mapped, size)
        for name in ("q", "block_table", "seq_lens", "query_start")
        if name in operands
    }
    folded["cache"] = folding.pool(operands["cache"], "cache" in mapped)
    if "cache" in mapped:
        num_blocks = operands["cache"].shape[1]
        folded["block_table"] = folding.shift_into_pool(folded["block_table"], size, num_blocks)
    if "query_start" in operands:
        folding.check_pool(size, tokens)
        bounds = jnp.clip(folded["query_start"], 0, tokens)
        first = jnp.arange(size, dtype=jnp.int32)[:, None] * tokens
        folded["query_start"] = bounds + folding.of_each(first, bounds.shape[0])
    for name in ("rotation", "centroids", "sink", "scale"):
        if name in operands:
            folded[name] = folding.grouped(operands[name], name in mapped, size)
    return {name: folded[name] for name in operands}, static


turboquant = Operator(
    "turboquant_attention",
    reference=turboquant_reference,
    outputs=_outputs,
    fold=_fold,
    empty=_empty,
    cost=_cost,
    instead="jax.nn.dot_product_attention on the dequantised cache",
)


def _run_triton(operands, call):
    from jax_beam_attn.turboquant import kernel_triton

    return kernel_triton.run(operands, call)


turboquant.implementations = [
    Implementation("triton", availability.triton_unavailable, triton_unsupported, _run_triton),
]
