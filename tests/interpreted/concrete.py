"""Operators whose Triton kernels run on concrete arrays, without a primitive around them."""

from __future__ import annotations

import importlib

import jax.numpy as jnp
import numpy as np

from jax_beam_attn._core.operator import Call
from jax_beam_attn._core.target import TARGETS


def put_kernels_in_place(
    monkeypatch, api, primitive, *, gpu="h200", adapt=lambda operands: operands
):
    """Lets the kernels beside `api` take the place of its primitive.

    Args:
        api: The operator's `api` module.
        primitive: The primitive's name there.
        gpu: The GPU that plans are for.
        adapt: Changes the operands by name to what the interpreter can compute with.
    """
    kernels = api.__name__.replace(".api", ".kernel_triton")

    def run(operands, static, *, implementation, plan):
        operands = {name: array for name, array in operands.items() if array is not None}
        module = importlib.import_module(kernels)
        return module.run(adapt(operands), Call(static, plan, TARGETS[gpu], {}))

    monkeypatch.setattr(api, primitive, run)


def arguments(call):
    """A call's NumPy arrays as JAX arrays."""
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in call.items()}
