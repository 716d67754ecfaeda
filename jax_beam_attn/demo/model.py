"""A Llama-type language model in JAX: parameters, the layers, and a plain full forward pass.

The layers are unrolled, and every layer has parameters and caches of its own. A `lax.scan` over
stacked layers would compile faster, but each step of it slices its layer out of the stack, and a
custom call needs that slice as a buffer: one copy of the KV cache per layer and decode step.

Only what is stored (weights, KV caches) and what goes through the attention operator is in the
model's dtype. Everything between is float32, so that a narrow dtype costs no more accuracy than the
storage saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama-type model; hashable, hence a static argument of `jax.jit`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float


class LayerParams(NamedTuple):
    """Parameters of one decoder layer; matrices are stored [out, in] as in GGUF files."""

    attention_norm: jax.Array  # [hidden]
    query: jax.Array  # [Hq * D, hidden]
    key: jax.Array  # [Hkv * D, hidden]
    value: jax.Array  # [Hkv * D, hidden]
    attention_output: jax.Array  # [hidden, Hq * D]
    mlp_norm: jax.Array  # [hidden]
    gate: jax.Array  # [intermediate, hidden]
    up: jax.Array  # [intermediate, hidden]
    down: jax.Array  # [hidden, intermediate]


class LlamaParams(NamedTuple):
    """Parameters of the model; the embedding also projects to the logits (tied weights)."""

    embedding: jax.Array  # [vocab, hidden]
    layers: tuple[LayerParams, ...]
    final_norm: jax.Array  # [hidden]


# (layer, query [B, N, Hq, D], key [B, N, Hkv, D], value [B, N, Hkv, D]) -> [B, N, Hq, D]
Attend = Callable[[int, jax.Array, jax.Array, jax.Array], jax.Array]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T` in float32, without the TF32 rounding that is the default on GPUs.

    Args:
        x: [..., in], any float dtype.
        weight: [out, in], any float dtype.

    Returns:
        f32 [..., out].
    """
    return jnp.einsum(
        "...i,oi->...o",
        x.astype(jnp.float32),
        weight.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )


def rope(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding over interleaved pairs (2i, 2i + 1).

    GGUF stores the query and key projections of Llama models with their rows permuted for this
    form. The half-split form (i, i + D/2) of the original checkpoints would be wrong here, and
    wrong quietly: the model still answers, only worse.

    Args:
        x: [B, N, H, D].
        positions: int [B, N].
        theta: Base of the frequencies.

    Returns:
        [B, N, H, D] in x's dtype.
    """
    head_dim = x.shape[-1]
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies  # [B, N, 1, D/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def run_layers(
    params: LlamaParams,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    config: LlamaConfig,
) -> jax.Array:
    """Embeds the tokens and runs all layers; how tokens attend is the caller's.

    Args:
        params: The model.
        tokens: int [B, N].
        positions: int [B, N].
        attend: Called once a layer, with queries and keys already rotated.
        config: The model's sizes.

    Returns:
        f32 [B, N, hidden], normalised: ready for `unembed`.
    """
    dtype = params.embedding.dtype
    heads = (*tokens.shape, -1, config.head_dim)
    x = params.embedding[tokens].astype(jnp.float32)
    for index, layer in enumerate(params.layers):
        h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
        query = rope(project(h, layer.query).reshape(heads), positions, config.rope_theta)
        key = rope(project(h, layer.key).reshape(heads), positions, config.rope_theta)
        value = project(h, layer.value).reshape(heads)
        attended = attend(index, query.astype(dtype), key.astype(dtype), value.astype(dtype))
        x += project(attended.reshape(*tokens.shape, -1), layer.attention_output)
        h = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
        x += project(jax.nn.silu(project(h, layer.gate)) * project(h, layer.up), layer.down)
    return rms_norm(x, params.final_norm, config.rms_norm_eps)


def unembed(params: LlamaParams, hidden: jax.Array) -> jax.Array:
    """Logits of hidden states: [..., hidden] -> f32 [..., vocab]."""
    return project(hidden, params.embedding)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention of a sequence to itself, computed in float32.

    Args:
        query: [B, S, Hq, D].
        key: [B, S, Hkv, D].
        value: [B, S, Hkv, D].

    Returns:
        [B, S, Hq, D] in the query's dtype.
    """
    with jax.default_matmul_precision("highest"):
        out = jax.nn.dot_product_attention(
            *(x.astype(jnp.float32) for x in (query, key, value)), is_causal=True
        )
    return out.astype(query.dtype)


def forward(params: LlamaParams, tokens: jax.Array, config: LlamaConfig) -> jax.Array:
    """The plain full forward pass, without any cache.

    Causality makes padding at the end harmless to the positions before it.

    Args:
        params: The model.
        tokens: int [B, S], beginning at position 0.
        config: The model's sizes.

    Returns:
        f32 [B, S, hidden]: hidden states, which `unembed` turns into logits. (The logits of
        every position of a long sequence would take gigabytes.)
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return run_layers(
        params, tokens, positions, lambda _layer, q, k, v: causal_attention(q, k, v), config
    )
