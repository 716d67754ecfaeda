"""Suite `turboquant`: attention over a quantised cache beside attention over a plain bf16 one.

Rows of prefill have a bar too: `cudnn_dequantized`, cuDNN's causal attention after dequantising.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bench import shapes, torch_sdpa
from bench.shapes import TurboQuantShape
from bench.suite import Implementation, Suite
from bench.timing import Inputs
from jax_beam_attn import (
    TurboQuantFormat,
    hadamard_rotation,
    lloyd_max_centroids,
    turboquant_attention,
    turboquant_decode_attention,
    turboquant_dequantize,
    turboquant_store,
)

# Tokens that are quantised; larger caches repeat their blocks, in random order.
_DISTINCT_TOKENS = 65536


def make_inputs(shape: TurboQuantShape) -> Inputs:
    """Normal keys and values, stored in blocks in random order; all requests have full length.

    With the cache come its keys and values in bf16, dense and rotated back, for the peers: without
    the rest of a last block, for not every peer takes lengths.
    """
    format = TurboQuantFormat.preset(
        shape.preset,
        head_dim=shape.head_dim,
        num_kv_heads=shape.kv_heads,
        block_size=shape.block_size,
    )
    rng = np.random.default_rng(0)
    per_request = -(-shape.context // shape.block_size)
    num_blocks = shape.batch * per_request
    distinct = min(num_blocks, _DISTINCT_TOKENS // shape.block_size)
    rotation = hadamard_rotation(shape.head_dim, jax.random.key(0))
    book = {}
    if not format.key_is_fp8:
        centroids = lloyd_max_centroids(format.key_bits, shape.head_dim)
        book = {"rotation": rotation, "centroids": centroids}
    blocks = _stored(distinct, format, book)
    k, v = turboquant_dequantize(blocks, format=format, centroids=book.get("centroids"))
    if book:
        k = jnp.einsum("bthi,ij->bthj", k, rotation, precision="highest")

    # Block n of the cache is block source[n] of the distinct ones.
    source = rng.integers(0, distinct, num_blocks).astype(np.int32)
    table = rng.permutation(num_blocks).astype(np.int32).reshape(shape.batch, per_request)
    dense = (shape.batch, per_request * shape.block_size, shape.kv_heads, shape.head_dim)
    per_query = shape.context if shape.prefill else 1
    query = (shape.batch * per_query, shape.heads, shape.head_dim)
    bounds = jnp.arange(shape.batch + 1) * per_query
    return {
        "query": jax.random.normal(jax.random.key(1), query, jnp.bfloat16),
        **({"query_start_loc": bounds} if shape.prefill else {}),
        "kv_cache": blocks[source],
        "block_table": jnp.asarray(table),
        "seq_lens": jnp.full(shape.batch, shape.context, jnp.int32),
        **book,
        "k_dense": k.astype(jnp.bfloat16)[source[table]].reshape(dense)[:, : shape.context],
        "v_dense": v.astype(jnp.bfloat16)[source[table]].reshape(dense)[:, : shape.context],
    }


def _stored(num_blocks: int, format: TurboQuantFormat, book: Inputs) -> jax.Array:
    tokens = num_blocks * format.block_size
    key, value = jax.random.normal(
        jax.random.key(2), (2, tokens, format.num_kv_heads, format.head_dim), jnp.bfloat16
    )
    return turboquant_store(
        jnp.zeros(format.cache_shape(num_blocks), jnp.uint8),
        key,
        value,
        jnp.arange(tokens),
        format=format,
        rotation=book.get("rotation"),
        centroids=book.get("centroids"),
    )


def format_of(inputs: Inputs) -> TurboQuantFormat:
    """The format of a cache, from its shape; norm correction makes no difference to attention."""
    _, block_size, kv_heads, slot_bytes = inputs["kv_cache"].shape
    key_bits = 8
    if "centroids" in inputs:
        key_bits = len(inputs["centroids"]).bit_length() - 1
    candidates = [
        TurboQuantFormat(
            inputs["query"].shape[-1], kv_heads, block_size, key_bits, value_bits, True
        )
        for value_bits in (3, 4)
    ]
    return next(each for each in candidates if each.slot_bytes == slot_bytes)


def _attend(inputs: Inputs, query: jax.Array, implementation: str | None) -> jax.Array:
    arguments = query, inputs["kv_cache"], inputs["block_table"], inputs["seq_lens"]
    options: dict[str, Any] = {
        "format": format_of(inputs),
        "rotation": inputs.get("rotation"),
        "centroids": inputs.get("centroids"),
        "implementation": implementation,
    }
    if "query_start_loc" in inputs:
        options["max_query_len"] = query.shape[0] // len(inputs["seq_lens"])
        out = turboquant_attention(*arguments, inputs["query_start_loc"], **options)
    else:
        out = turboquant_decode_attention(*arguments, **options)
    return cast(jax.Array, out)  # a tuple only with return_lse


def reference(inputs: Inputs) -> jax.Array:
    """The float32 result from the same cache."""
    run = jax.jit(lambda inputs: _attend(inputs, inputs["query"].astype(jnp.float32), "reference"))
    return run({name: x for name, x in inputs.items() if "dense" not in name})


def _library(implementation: str) -> Callable[[Inputs], jax.Array]:
    return lambda inputs: _attend(inputs, inputs["query"], implementation)


def xla_dense(inputs: Inputs) -> jax.Array:
    """Attention over the bf16 keys and values, left to XLA."""
    return _dense(inputs, inputs["k_dense"], inputs["v_dense"], "xla")


def cudnn_dense(inputs: Inputs) -> jax.Array:
    """Attention over the bf16 keys and values by cuDNN."""
    return _cudnn(inputs, inputs["k_dense"], inputs["v_dense"])


def cudnn_dequantized(inputs: Inputs) -> jax.Array:
    """Dequantises the requests' tokens to bf16 and rotates them back, then as `cudnn_dense`."""
    blocks = inputs["kv_cache"][inputs["block_table"]]
    k, v = turboquant_dequantize(
        blocks.reshape(-1, *blocks.shape[2:]),
        format=format_of(inputs),
        centroids=inputs.get("centroids"),
    )
    batch, context, kv_heads, head_dim = inputs["k_dense"].shape
    dense = (batch, -1, kv_heads, head_dim)
    k, v = (x.astype(jnp.bfloat16).reshape(dense)[:, :context] for x in (k, v))
    if "rotation" in inputs:
        k = jnp.einsum("bthi,ij->bthj", k, inputs["rotation"].astype(jnp.bfloat16))
    return _cudnn(inputs, k, v)


def _cudnn(inputs: Inputs, k: jax.Array, v: jax.Array) -> jax.Array:
    if jax.default_backend() != "gpu":
        raise NotImplementedError("cuDNN needs a GPU")
    return _dense(inputs, k, v, "cudnn")


def _dense(inputs: Inputs, k: jax.Array, v: jax.Array, implementation) -> jax.Array:
    query = inputs["query"]
    prefill = "query_start_loc" in inputs
    out = jax.nn.dot_product_attention(
        query.reshape(k.shape[0], -1, *query.shape[1:]),
        k,
        v,
        is_causal=prefill,
        # All tokens of a prefill are there, and without lengths the causal kernel is faster.
        key_value_seq_lengths=None if prefill else inputs["seq_lens"],
        implementation=implementation,
    )
    return out.reshape(query.shape)


SUITE = Suite(
    shapes=shapes.TURBOQUANT + shapes.TURBOQUANT_PREFILL,
    quick_shapes=shapes.TURBOQUANT_QUICK,
    l2="cold",
    make_inputs=make_inputs,
    reference=reference,
    implementations={
        "reference": Implementation(_library("reference"), tolerance=3e-3),
        "triton": Implementation(_library("triton"), tolerance=3e-3),
        # What others compute is held to what bf16 can do, not to our standard.
        "xla_dense": Implementation(xla_dense, tolerance=1e-2),
        "cudnn_dense": Implementation(cudnn_dense, tolerance=1e-2),
        "cudnn_dequantized": Implementation(cudnn_dequantized, tolerance=1e-2),
        "torch_sdpa": Implementation(
            torch_sdpa.attend, tolerance=1e-2, time_call=torch_sdpa.time_call
        ),
    },
)
