"""The primitive of sparse MLA decode.

Operands, all in one canonical form whatever the caller's:

    q                  [B, Sq, Hq, Dqk]
    cache              uint8 [num_blocks, block_bytes], or bf16 [num_blocks, page_size, Dqk]
    indices            i32 [B, Sq, T]
    topk_length        i32 [B] or [B, Sq], optional
    extra_cache, extra_indices, extra_topk_length: likewise, all optional
    begin, first_slot  i32 [num_parts + 1, 2] and [B * Sq + 1], a schedule, optional
    sink               f32 [Hq] or [B, Hq], optional
    scale              f32 [] or [B], absent where it is static
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_beam_attn._core import availability, folding
from jax_beam_attn._core.operator import Implementation, Operator, Output
from jax_beam_attn.sparse_mla.cache import VALUE_DIM
from jax_beam_attn.sparse_mla.plan import triton_unsupported
from jax_beam_attn.sparse_mla.reference import sparse_mla_reference


@dataclasses.dataclass(frozen=True)
class SparseMlaStatic:
    """Static arguments.

    Attributes:
        format: "v32", "model1" or "bf16".
        scale: Softmax scale, or None where it is an operand.
        page_size: Tokens of a block.
        extra_page_size: Those of the extra cache, 0 without one.
    """

    format: str
    scale: float | None
    page_size: int
    extra_page_size: int


def _outputs(operands, static):
    q = operands["q"]
    return (
        Output((*q.shape[:3], VALUE_DIM), q.dtype),
        Output(q.shape[:3], jnp.float32, empty=-jnp.inf),
    )


def _keys(operands) -> int:
    """Listed tokens of a query in both caches."""
    return sum(operands[n].shape[2] for n in ("indices", "extra_indices") if n in operands)


def _cost(operands, static):
    q = operands["q"]
    rows, head_dim = q.shape[0] * q.shape[1], q.shape[3]
    cache = operands["cache"]
    token_bytes = 2 * head_dim if static.format == "bf16" else cache.shape[1] // static.page_size
    return {
        "flops": 2 * rows * q.shape[2] * _keys(operands) * (head_dim + VALUE_DIM),
        "bytes_accessed": rows * _keys(operands) * token_bytes + 4 * q.size,
    }


def _fold(size, operands, mapped, static):
    batch = operands["q"].shape[1 if "q" in mapped else 0]
    folded = {"q": folding.batched(operands["q"], "q" in mapped, size)}
    for prefix, page_size in (("", static.page_size), ("extra_", static.extra_page_size)):
        cache, indices, length = f"{prefix}cache", f"{prefix}indices", f"{prefix}topk_length"
        if cache not in operands:
            continue
        folded[cache] = folding.pool(operands[cache], cache in mapped)
        folded[indices] = folding.batched(operands[indices], indices in mapped, size)
        if cache in mapped:
            pool_size = operands[cache].shape[1] * page_size
            folded[indices] = folding.shift_into_pool(folded[indices], size, pool_size)
        if length in operands:
            folded[length] = folding.batched(operands[length], length in mapped, size)
    for name, rank in (("sink", 1), ("scale", 0)):
        if name in operands:
            folded[name] = folding.per_sample(operands[name], name in mapped, size, batch, rank)
    # A schedule is for one of the calls; for all of them together the kernel makes its own.
    return {name: folded[name] for name in operands if name in folded}, static


sparse_mla = Operator(
    "sparse_mla_decode",
    reference=sparse_mla_reference,
    outputs=_outputs,
    fold=_fold,
    empty=lambda operands, static: _keys(operands) == 0,
    cost=_cost,
    instead="jax.nn.dot_product_attention on the unpacked cache",
)


def _run_triton(operands, call):
    from jax_beam_attn.sparse_mla import kernel_triton

    return kernel_triton.run(operands, call)


sparse_mla.implementations = [
    Implementation("triton", availability.triton_unavailable, triton_unsupported, _run_triton),
]
