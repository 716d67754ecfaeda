"""The definition of TurboQuant attention, in plain `jnp`.

A request's keys and values lie in the blocks that its row of the block table names. A token
attends to the keys up to its own position, and rotating its query instead of the keys back gives
the same scores: (R q).(R k) = q.k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_beam_attn._core import folding
from jax_beam_attn._core.merge import apply_sink
from jax_beam_attn.turboquant.cache import dequantize

_CHUNK_ELEMENTS = 2**27  # of keys that are gathered at once


def turboquant_reference(operands, static) -> tuple[jax.Array, jax.Array]:
    """Attention in float32.

    Args:
        operands: See `jax_beam_attn.turboquant.op`.
        static: `TurboQuantStatic`.

    Returns:
        out [T, Hq, D] in q's dtype and lse f32 [T, Hq].
    """
    q = operands["q"].astype(jnp.float32)
    tokens, heads, head_dim = q.shape
    keys, values, present = _requests(operands, static)
    requests, capacity = present.shape
    kv_heads = keys.shape[2]
    request, limit = _positions(operands, tokens, capacity)

    def of_each_token(name):
        return folding.of_each(operands[name], requests)[request]

    if "rotation" in operands:
        rotated = [
            jnp.einsum("thi,ji->thj", part, rotation, precision="highest")
            for part, rotation in zip(
                jnp.split(q, len(operands["rotation"])), operands["rotation"], strict=True
            )
        ]
        q = jnp.concatenate(rotated)
    scale = static.scale
    if scale is None:
        q, scale = q * of_each_token("scale")[:, None, None], 1.0
    position = jnp.arange(capacity, dtype=jnp.int32)

    def attend(token):
        q, request, limit = token  # [Hq, D], and the first key that the token does not see
        k, v = keys[request], values[request]
        valid = present[request] & (position < limit)
        if static.window is not None:
            valid &= position >= limit - static.window
        grouped = q.reshape(kv_heads, heads // kv_heads, head_dim)
        logits = jnp.einsum("kgd,tkd->kgt", grouped, k, precision="highest") * scale
        if static.soft_cap is not None:
            logits = static.soft_cap * jnp.tanh(logits / static.soft_cap)
        logits = jnp.where(valid[None, None], logits, -jnp.inf)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        # A row with nothing to attend to has peak -inf; 0 in its place keeps the weights 0.
        weights = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
        total = jnp.sum(weights, axis=-1)
        out = jnp.einsum("kgt,tkd->kgd", weights, v, precision="highest")
        out /= jnp.where(total == 0.0, 1.0, total)[..., None]
        lse = jnp.where(total == 0.0, -jnp.inf, peak[..., 0] + jnp.log(total))
        return out.reshape(q.shape), lse.reshape(heads)

    at_once = max(1, min(tokens, _CHUNK_ELEMENTS // max(1, keys[0].size)))
    out, lse = jax.lax.map(attend, (q, request, limit), batch_size=at_once)
    if "sink" in operands:
        out = apply_sink(out, lse, of_each_token("sink"))
    return out.astype(operands["q"].dtype), lse


def _requests(operands, static):
    """Keys (as stored) and values f32 [S, L, Hkv, D] and which are there [S, L]; others are zero.

    They are zeroed, not only masked: what lies beyond a length may be NaN, and 0 * NaN is NaN.
    """
    cache, table = operands["cache"], operands["block_table"]
    format = static.format
    requests, max_blocks = table.shape
    capacity = max_blocks * format.block_size
    blocks = cache.at[table].get(mode="clip")
    if format.key_is_fp8:
        keys, values = dequantize(blocks, format, None)
    else:
        centroids = folding.of_each(operands["centroids"], requests)
        keys, values = jax.vmap(lambda b, c: dequantize(b, format, c))(blocks, centroids)
    in_pool = (table >= 0) & (table < cache.shape[0])
    present = jnp.repeat(in_pool, format.block_size, axis=1)
    present &= jnp.arange(capacity, dtype=jnp.int32)[None] < operands["seq_lens"][:, None]

    def flat(array):
        array = array.reshape(requests, capacity, *array.shape[3:])
        return jnp.where(present[..., None, None], array, 0.0)

    return flat(keys), flat(values), present


def _positions(operands, tokens, capacity):
    """Each token's request, and its position plus one; 0 for a token of no request."""
    length = jnp.clip(operands["seq_lens"], 0, capacity)
    token = jnp.arange(tokens, dtype=jnp.int32)
    if "query_start" not in operands:
        return token, length
    bounds = operands["query_start"]
    groups, per_group = bounds.shape[0], bounds.shape[1] - 1
    bounds = jnp.clip(bounds, 0, tokens).reshape(-1)
    # The last bound at or before the token; that of an empty request equals the next one's.
    last = jnp.searchsorted(bounds, token, side="right").astype(jnp.int32) - 1
    index = last % (per_group + 1)
    request = jnp.clip(last // (per_group + 1) * per_group + index, 0, groups * per_group - 1)
    behind = length[request] - (bounds[jnp.maximum(last, 0) + 1] - token) + 1
    return request, jnp.where((last >= 0) & (index < per_group), behind, 0)
