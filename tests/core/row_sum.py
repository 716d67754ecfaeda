"""A tiny operator that exercises all of the machinery: ragged row sums.

    row_sum(x f32 [B, N], length i32 [B]) -> (total f32 [B],)   total[b] = sum of x[b, :length[b]]

Its kernels loop over run-time sizes, and the CuTe one reduces through shared memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jax_beam_attn._core import availability, folding
from jax_beam_attn._core.operator import Implementation, Operator, Output


@dataclasses.dataclass(frozen=True)
class RowSumStatic:
    factor: float = 1.0


def _reference(operands, static):
    x, length = operands["x"], operands["length"]
    valid = jnp.arange(x.shape[1]) < length[:, None]
    return (jnp.sum(jnp.where(valid, x, 0.0), axis=1) * static.factor,)


def _fold(size, operands, mapped, static):
    return {n: folding.batched(a, n in mapped, size) for n, a in operands.items()}, static


def _run_triton(operands, call):
    from jax_beam_attn._core.triton_call import triton_call
    from tests.core.row_sum_triton import row_sum_kernel

    x = operands["x"]
    return triton_call(
        row_sum_kernel,
        [x, operands["length"]],
        (x.shape[1],),
        [jax.ShapeDtypeStruct(x.shape[:1], x.dtype)],
        grid=(x.shape[0],),
        target=call.target,
        cost=call.cost,
        FACTOR=call.static.factor,
        BLOCK=128,
    )


def _run_cute(operands, call):
    from jax_beam_attn._core.cute_call import cute_call
    from tests.core.row_sum_cute import launch_row_sum

    x = operands["x"]
    return cute_call(
        launch_row_sum,
        [x, operands["length"]],
        [jax.ShapeDtypeStruct(x.shape[:1], x.dtype)],
        target=call.target,
        factor=call.static.factor,
    )


operator = Operator(
    "row_sum",
    reference=_reference,
    outputs=lambda operands, static: (Output(operands["x"].shape[:1], jnp.float32),),
    fold=_fold,
    empty=lambda operands, static: operands["x"].shape[1] == 0,
    cost=lambda operands, static: {
        "flops": operands["x"].size,
        "bytes_accessed": 4 * operands["x"].size,
    },
    instead="jnp.sum",
)
operator.implementations = [
    Implementation(
        "cute",
        functools.partial(availability.cute_unavailable, capabilities=(90, 100)),
        lambda *_: None,
        _run_cute,
    ),
    Implementation("triton", availability.triton_unavailable, lambda *_: None, _run_triton),
]


def row_sum(x, length, *, factor=1.0, implementation=None):
    return operator(
        {"x": x, "length": length}, RowSumStatic(factor), implementation=implementation
    )[0]
