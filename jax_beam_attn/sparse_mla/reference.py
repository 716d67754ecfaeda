"""The definition of sparse MLA decode, in plain `jnp`.

Every query attends to the tokens whose slots are listed for it, in the main cache and in an extra
one, under one softmax. The key of a token is its whole row, its value the first 512 dimensions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_beam_attn._core.merge import apply_sink
from jax_beam_attn.sparse_mla.cache import FORMATS, VALUE_DIM, dequantize, split_blocks


def sparse_mla_reference(operands, static) -> tuple[jax.Array, jax.Array]:
    """Attention in float32.

    Args:
        operands: See `op.py`.
        static: `SparseMlaStatic`.

    Returns:
        out bf16 [B, Sq, Hq, 512] and lse f32 [B, Sq, Hq].
    """
    q = operands["q"].astype(jnp.float32)
    keys, valid = _selected(operands, "cache", "indices", "topk_length", static, static.page_size)
    if "extra_cache" in operands:
        more_keys, more_valid = _selected(
            operands,
            "extra_cache",
            "extra_indices",
            "extra_topk_length",
            static,
            static.extra_page_size,
        )
        keys = jnp.concatenate([keys, more_keys], axis=2)
        valid = jnp.concatenate([valid, more_valid], axis=2)
    scale = static.scale if static.scale is not None else operands["scale"]

    logits = jnp.einsum("bqhd,bqtd->bqht", q, keys, precision="highest")
    logits = jnp.where(valid[:, :, None], logits * jnp.reshape(scale, (-1, 1, 1, 1)), -jnp.inf)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    # A row with nothing to attend to has peak -inf; 0 in its place keeps the weights 0, not NaN.
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.sum(weights, axis=-1)
    out = jnp.einsum("bqht,bqtd->bqhd", weights, keys[..., :VALUE_DIM], precision="highest")
    out /= jnp.where(total == 0.0, 1.0, total)[..., None]
    lse = jnp.where(total == 0.0, -jnp.inf, peak[..., 0] + jnp.log(total))
    if "sink" in operands:
        out = apply_sink(out, lse, operands["sink"].reshape(-1, 1, q.shape[2]))
    return out.astype(operands["q"].dtype), lse


def _selected(operands, cache_name, indices_name, length_name, static, page_size):
    """The listed keys f32 [B, Sq, T, Dqk] and which are valid [B, Sq, T]; invalid ones are zero.

    They are zeroed, not only masked: an unused slot may hold NaN, and 0 * NaN is NaN.
    """
    cache, slots = operands[cache_name], operands[indices_name]
    valid = (slots >= 0) & (slots < cache.shape[0] * page_size)
    if length_name in operands:
        length = operands[length_name]
        length = length.reshape(*length.shape, *(1,) * (3 - length.ndim))
        valid &= jnp.arange(slots.shape[2], dtype=jnp.int32)[None, None] < length
    if cache.shape[0] == 0 or page_size == 0:
        return jnp.zeros((*slots.shape, operands["q"].shape[-1]), jnp.float32), valid
    block, offset = slots // page_size, slots % page_size
    if static.format == "bf16":
        keys = cache.at[block, offset].get(mode="clip").astype(jnp.float32)
    else:
        rows, scales = (
            part.at[block, offset].get(mode="clip")
            for part in split_blocks(cache, FORMATS[static.format], page_size)
        )
        keys = dequantize(rows, scales, FORMATS[static.format])
    return jnp.where(valid[..., None], keys, 0.0), valid
