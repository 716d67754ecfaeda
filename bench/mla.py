"""Suite `mla`: `sparse_mla_decode` on FP8 caches.

The rows of `peers.json` take the schedule as an argument, as all layers of a step but the first
do. Those whose ids end in "-all" make it in the call, from lengths that are not known before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bench import shapes
from bench.shapes import MlaShape
from bench.suite import Implementation, Suite
from bench.timing import Inputs
from jax_beam_attn import mla_schedule, pack_mla_cache, sparse_mla_decode
from jax_beam_attn.sparse_mla.op import SparseMlaStatic
from jax_beam_attn.sparse_mla.reference import sparse_mla_reference


def make_inputs(shape: MlaShape) -> Inputs:
    """Random inputs of a shape, as `sparse_mla_decode`'s arguments by name.

    Each request has a cache of its own, in which its tokens are listed at random, none twice.
    All requests' caches hold the same numbers.
    """
    q_key, *cache_keys = jax.random.split(jax.random.key(0), 3)
    rng = np.random.default_rng(0)
    lead = (shape.batch, shape.seqlen_q)
    inputs: dict[str, Any] = {
        "q": jax.random.normal(q_key, (*lead, shape.heads, shape.key_dim), jnp.bfloat16),
        "kv_cache": _cache(shape, cache_keys[0]),
        "indices": _indices(shape, shape.topk, rng),
    }
    if shape.extra_topk:
        inputs["extra_kv_cache"] = _cache(shape, cache_keys[1])
        inputs["extra_indices"] = _indices(shape, shape.extra_topk, rng)
    if shape.schedule_in_call:
        inputs["topk_length"] = jnp.full(shape.batch, shape.topk, jnp.int32)
    else:
        inputs["schedule"] = mla_schedule(
            batch=shape.batch,
            seqlen_q=shape.seqlen_q,
            num_heads=shape.heads,
            topk=shape.topk,
            extra_topk=shape.extra_topk,
        )
    return inputs


def _cache(shape: MlaShape, key: jax.Array) -> jax.Array:
    pages = shape.context // shape.page_size
    keys = jax.random.normal(key, (pages, shape.page_size, 1, shape.key_dim))
    return jnp.tile(pack_mla_cache(keys, shape.format), (shape.batch, 1, 1, 1))


def _indices(shape: MlaShape, topk: int, rng: np.random.Generator) -> jax.Array:
    """int32 [B, Sq, topk], slots of the request's own pages."""
    first = shape.context // shape.page_size * shape.page_size
    listed = [
        [request * first + rng.permutation(shape.context)[:topk] for _ in range(shape.seqlen_q)]
        for request in range(shape.batch)
    ]
    return jnp.asarray(np.array(listed, np.int32))


def reference(inputs: Inputs) -> jax.Array:
    """The float32 result from the same bytes and bf16 queries."""
    format = "v32" if inputs["kv_cache"].shape[-1] == 656 else "model1"
    operands = {"q": inputs["q"].astype(jnp.float32)}
    page_sizes = {"": 0, "extra_": 0}
    for prefix in page_sizes:
        if (cache := inputs.get(f"{prefix}kv_cache")) is None:
            continue
        page_sizes[prefix] = cache.shape[1]
        operands[f"{prefix}cache"] = cache.reshape(cache.shape[0], -1)
        operands[f"{prefix}indices"] = inputs[f"{prefix}indices"]
    static = SparseMlaStatic(format, inputs["q"].shape[-1] ** -0.5, *page_sizes.values())
    return jax.jit(lambda operands: sparse_mla_reference(operands, static)[0])(operands)


def _library(implementation: str) -> Callable[[Inputs], jax.Array]:
    def run(inputs: Inputs) -> jax.Array:
        arguments: dict[str, Any] = dict(inputs)
        out = sparse_mla_decode(**arguments, implementation=implementation)
        return cast(jax.Array, out)  # a tuple only with return_lse

    return run


SUITE = Suite(
    shapes=shapes.MLA + shapes.MLA_ALL,
    quick_shapes=shapes.MLA_QUICK,
    l2="warm",
    make_inputs=make_inputs,
    reference=reference,
    implementations={
        "reference": Implementation(_library("reference"), tolerance=4e-3),
        "triton": Implementation(_library("triton"), tolerance=4e-3),
    },
)
