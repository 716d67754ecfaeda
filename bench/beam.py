"""Suite `beam`: `beam_decode_attn` beside what a JAX user can write today."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bench import shapes
from bench.shapes import BeamShape
from bench.suite import Implementation, Suite
from bench.timing import Inputs
from jax_beam_attn import beam_decode_attn


def make_inputs(shape: BeamShape) -> Inputs:
    """Random bf16 inputs of a shape, as `beam_decode_attn`'s arguments by name.

    Each KV head has its own ancestry, as in the source system. Within a step the beams' rows are
    a permutation: every row of the beam cache is read, as the floor counts.
    """
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*dims: int) -> jax.Array:
        return jax.random.normal(next(keys), dims, jnp.bfloat16)

    context = (shape.batch, shape.context, shape.kv_heads, shape.head_dim)
    beam = (shape.batch, shape.steps * shape.width, shape.kv_heads, shape.head_dim)
    inputs = {
        "q": normal(shape.batch, 1, shape.width, shape.heads, shape.head_dim),
        "k_context": normal(*context),
        "v_context": normal(*context),
        "k_beam": normal(*beam),
        "v_beam": normal(*beam),
        "topk_indices": jnp.asarray(_ancestry(shape)),
        "decode_nums": jnp.int32(shape.steps),
    }
    if shape.lengths:
        inputs["seqused_k"] = jnp.array(shape.lengths, jnp.int32)
    return inputs


def _ancestry(shape: BeamShape) -> np.ndarray:
    """int32 [B, 1, Hkv, steps, W]; row = step * W + beam."""
    beams = np.broadcast_to(
        np.arange(shape.width), (shape.batch, 1, shape.kv_heads, shape.steps, shape.width)
    )
    permuted = np.random.default_rng(0).permuted(beams, axis=-1)
    return (permuted + np.arange(shape.steps)[:, None] * shape.width).astype(np.int32)


def reference(inputs: Inputs) -> jax.Array:
    """The float32 result from the same bf16 inputs."""
    exact = {
        name: array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array
        for name, array in inputs.items()
    }
    with jax.default_matmul_precision("highest"):
        return jax.jit(_library("reference"))(exact)


def _library(implementation: str) -> Callable[[Inputs], jax.Array]:
    def run(inputs: Inputs) -> jax.Array:
        arguments: dict[str, Any] = dict(inputs)
        out = beam_decode_attn(**arguments, implementation=implementation)
        return cast(jax.Array, out)  # a tuple only with return_lse

    return run


def xla_naive(inputs: Inputs) -> jax.Array:
    """Gather, einsum, one softmax over the concatenated logits, einsum: left to XLA."""
    q, k_beam, v_beam, beam_valid = _gathered(inputs)
    k, v = inputs["k_context"], inputs["v_context"]
    f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    of_context = f32("bwkgd,btkd->bwkgt", q, k)
    if "seqused_k" in inputs:
        valid = jnp.arange(k.shape[1]) < inputs["seqused_k"][:, None]
        of_context = jnp.where(valid[:, None, None, None], of_context, -jnp.inf)
    of_beam = jnp.where(beam_valid, f32("bwkgd,bkswd->bwkgs", q, k_beam), -jnp.inf)
    logits = jnp.concatenate([of_context, of_beam], axis=-1) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(logits).astype(q.dtype)
    out = f32("bwkgt,btkd->bwkgd", weights[..., : k.shape[1]], v)
    out += f32("bwkgs,bkswd->bwkgd", weights[..., k.shape[1] :], v_beam)
    return out.astype(q.dtype).reshape(inputs["q"].shape)


def cudnn_context_jnp(inputs: Inputs) -> jax.Array:
    """The context by cuDNN, the beams being its query length; the beams' rows by jnp; a merge.

    JAX hands cuDNN's float32 LSE out in the output's dtype, bf16: that is most of its error.
    """
    if jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs a GPU")
    q, k_beam, v_beam, beam_valid = _gathered(inputs)
    out_context, lse_context = jax.nn.dot_product_attention(
        inputs["q"][:, 0],
        inputs["k_context"],
        inputs["v_context"],
        key_value_seq_lengths=inputs.get("seqused_k"),
        implementation="cudnn",
        return_residual=True,
    )
    f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    logits = f32("bwkgd,bkswd->bwkgs", q, k_beam) * q.shape[-1] ** -0.5
    logits = jnp.where(beam_valid, logits, -jnp.inf)
    lse_beam = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    out_beam = f32("bwkgs,bkswd->bwkgd", jnp.exp(logits - lse_beam).astype(q.dtype), v_beam)
    # exp(a) / (exp(a) + exp(b)) = sigmoid(a - b) is the context's share.
    share = jax.nn.sigmoid(lse_context.reshape(lse_beam.shape).astype(jnp.float32) - lse_beam)
    out = out_beam + share * (out_context.reshape(q.shape) - out_beam)
    return out.astype(q.dtype).reshape(inputs["q"].shape)


def _gathered(inputs: Inputs):
    """Query [B, W, Hkv, G, D], each beam's keys and values [B, Hkv, steps, W, D], and [steps]."""
    batch, _, width, heads, head_dim = inputs["q"].shape
    kv_heads = inputs["k_beam"].shape[2]
    q = inputs["q"].reshape(batch, width, kv_heads, heads // kv_heads, head_dim)
    rows = inputs["topk_indices"][:, 0]
    sample = jnp.arange(batch)[:, None, None, None]
    head = jnp.arange(kv_heads)[:, None, None]
    valid = jnp.arange(rows.shape[2]) < inputs["decode_nums"]
    return q, inputs["k_beam"][sample, rows, head], inputs["v_beam"][sample, rows, head], valid


SUITE = Suite(
    shapes=shapes.BEAM,
    quick_shapes=shapes.BEAM_QUICK,
    l2="warm",
    make_inputs=make_inputs,
    reference=reference,
    implementations={
        "reference": Implementation(_library("reference"), tolerance=4e-3),
        "triton": Implementation(_library("triton"), tolerance=4e-3),
        "cute": Implementation(_library("cute"), tolerance=4e-3),
        # What others compute is held to what bf16 can do, not to our standard.
        "xla_naive": Implementation(xla_naive, tolerance=1e-2),
        "cudnn_context_jnp": Implementation(cudnn_context_jnp, tolerance=1e-2),
    },
)
