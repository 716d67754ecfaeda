"""The primitive of beam decode attention.

Operands, all in one canonical form whatever the caller's:

    q             [B, W, Hq, D]
    k/v_context   [B, Sk, Hkv, D] dense, [total, Hkv, D] jagged, [pages, page_size, Hkv, D] paged
    cu_seqlens    i32 [N, B/N + 1], jagged only: bounds of B/N samples each; N > 1 under vmap
    block_tables  i32 [B, M], paged only
    seqused       i32 [B], optional
    k/v_beam      [B, S, Hkv, D]
    topk_indices  i32 [B, H, T, W], H one of 1, Hkv, Hq
    decode_nums   i32 [] or [B]
    sink          f32 [Hq] or [B, Hq], optional
    scale         f32 [] or [B], absent where it is static
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_beam_attn._core import availability, folding
from jax_beam_attn._core.operator import Implementation, Operator, Output
from jax_beam_attn.beam_decode.plan import hopper_unsupported, triton_unsupported
from jax_beam_attn.beam_decode.reference import beam_decode_reference


@dataclasses.dataclass(frozen=True)
class BeamDecodeStatic:
    """Static arguments.

    Attributes:
        scale: Softmax scale, or None where it is an operand.
        soft_cap: Logit soft cap, or None.
        capacity: The longest context that a sample can have, in tokens.
        total: The most context tokens that all samples together can have.
    """

    scale: float | None
    soft_cap: float | None
    capacity: int
    total: int


def _outputs(operands, static):
    q = operands["q"]
    return (
        Output(q.shape, q.dtype),
        Output(q.shape[:3], jnp.float32, empty=-jnp.inf),
    )


def _empty(operands, static) -> bool:
    """Whether there is neither a context nor a beam row to attend to."""
    topk, k_beam = operands["topk_indices"], operands["k_beam"]
    no_context = static.capacity == 0 or 0 in operands["k_context"].shape
    return no_context and 0 in (topk.shape[1], topk.shape[2], k_beam.shape[1])


def _cost(operands, static):
    q, topk, k_context = operands["q"], operands["topk_indices"], operands["k_context"]
    batch, width, heads, head_dim = q.shape
    steps = topk.shape[2]
    beam_rows = batch * min(operands["k_beam"].shape[1], steps * width)
    row_bytes = k_context.shape[-2] * head_dim * k_context.dtype.itemsize
    return {
        "flops": 4 * width * heads * head_dim * (static.total + batch * steps),
        "bytes_accessed": 2 * (static.total + beam_rows) * row_bytes
        + 2 * q.size * q.dtype.itemsize
        + topk.size * topk.dtype.itemsize,
    }


def _fold(size, operands, mapped, static):
    batch = operands["q"].shape[1 if "q" in mapped else 0]
    folded = {
        name: folding.batched(operands[name], name in mapped, size)
        for name in ("q", "k_beam", "v_beam", "topk_indices", "seqused", "block_tables")
        if name in operands
    }
    for name, rank in (("decode_nums", 0), ("scale", 0), ("sink", 1)):
        if name in operands:
            folded[name] = folding.per_sample(operands[name], name in mapped, size, batch, rank)
    folded |= _fold_context(size, operands, mapped, batch)
    return (
        {name: folded[name] for name in operands | folded},
        dataclasses.replace(static, total=size * static.total),
    )


def _fold_context(size, operands, mapped, batch):
    """The context under vmap: never copied where it is shared by all N calls."""
    k, v = operands["k_context"], operands["v_context"]
    shared = not {"k_context", "v_context"} & mapped
    if not shared:
        k, v = (
            array if name in mapped else jnp.broadcast_to(array, (size, *array.shape))
            for name, array in (("k_context", k), ("v_context", v))
        )
    pools = {"k_context": folding.pool(k, not shared), "v_context": folding.pool(v, not shared)}

    if "block_tables" in operands:
        tables = folding.batched(operands["block_tables"], "block_tables" in mapped, size)
        if not shared:
            tables = folding.shift_into_pool(tables, size, k.shape[1])
        return pools | {"block_tables": tables}

    if "cu_seqlens" in operands:
        total = k.shape[0 if shared else 1]
        bounds = jnp.clip(operands["cu_seqlens"], 0, total)
        groups = bounds.shape[1 if "cu_seqlens" in mapped else 0]
        bounds = folding.batched(bounds, "cu_seqlens" in mapped, size)
        if not shared:
            folding.check_pool(size, total)
            bounds += jnp.repeat(jnp.arange(size, dtype=jnp.int32), groups)[:, None] * total
        return pools | {"cu_seqlens": bounds}

    if shared:
        # Dense samples used by several calls: the same rows, addressed by bounds.
        capacity = k.shape[1]
        folding.check_pool(batch, capacity)
        bounds = jnp.arange(batch + 1, dtype=jnp.int32) * capacity
        return {name: folding.pool(pool, True) for name, pool in pools.items()} | {
            "cu_seqlens": jnp.broadcast_to(bounds, (size, batch + 1))
        }
    return pools


beam_decode = Operator(
    "beam_decode_attn",
    reference=beam_decode_reference,
    outputs=_outputs,
    fold=_fold,
    empty=_empty,
    cost=_cost,
    instead="jax.nn.dot_product_attention",
)


def _run_triton(operands, call):
    from jax_beam_attn.beam_decode import kernel_triton

    return kernel_triton.run(operands, call)


def _run_hopper(operands, call):
    from jax_beam_attn.beam_decode import kernel_hopper

    return kernel_hopper.run(operands, call)


beam_decode.implementations = [
    Implementation("cute", availability.cute_unavailable, hopper_unsupported, _run_hopper),
    Implementation("triton", availability.triton_unavailable, triton_unsupported, _run_triton),
]
