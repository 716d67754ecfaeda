"""A small Llama-type model with random weights, whose distributions are neither flat nor sharp."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn.demo.model import LayerParams, LlamaConfig, LlamaParams

HIDDEN, INTERMEDIATE = 24, 40


def tiny_config(vocab_size: int = 13) -> LlamaConfig:
    return LlamaConfig(
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=vocab_size,
        context_length=256,
        rope_theta=1e4,
        rms_norm_eps=1e-5,
    )


def tiny_params(config: LlamaConfig, seed: int = 0) -> LlamaParams:
    rng = np.random.default_rng(seed)

    def matrix(out: int, fan_in: int, gain: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(0, gain * fan_in**-0.5, (out, fan_in)), jnp.float32)

    def norm() -> jax.Array:
        return jnp.asarray(rng.uniform(0.5, 1.5, HIDDEN), jnp.float32)

    query_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))

    def layer() -> LayerParams:
        return LayerParams(
            attention_norm=norm(),
            query=matrix(query_size, HIDDEN, 2.0),
            key=matrix(kv_size, HIDDEN, 2.0),
            value=matrix(kv_size, HIDDEN, 2.0),
            attention_output=matrix(HIDDEN, query_size, 2.0),
            mlp_norm=norm(),
            gate=matrix(INTERMEDIATE, HIDDEN),
            up=matrix(INTERMEDIATE, HIDDEN),
            down=matrix(HIDDEN, INTERMEDIATE),
        )

    return LlamaParams(
        embedding=matrix(config.vocab_size, HIDDEN, 1.5),
        layers=tuple(layer() for _ in range(config.num_layers)),
        final_norm=norm(),
    )
