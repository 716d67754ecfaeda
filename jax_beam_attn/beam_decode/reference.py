"""The definition of beam decode attention, in plain `jnp`.

Every beam attends to two sets of keys under one softmax: the context of its sample, shared by
all beams, and one row of the beam cache for each step decoded so far, chosen by `topk_indices`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_beam_attn._core.merge import apply_sink


def beam_decode_reference(operands, static) -> tuple[jax.Array, jax.Array]:
    """Attention in float32.

    Args:
        operands: See `jax_beam_attn.beam_decode.op`.
        static: `BeamDecodeStatic`.

    Returns:
        out [B, W, Hq, D] in q's dtype and lse f32 [B, W, Hq].
    """
    q = operands["q"].astype(jnp.float32)
    k_context, v_context, context_valid = _context(operands, static)
    k_beam, v_beam, beam_valid = _beam(operands)
    batch, width, heads, head_dim = q.shape
    kv_heads = k_context.shape[2]
    scale = static.scale if static.scale is not None else operands["scale"]
    scale = jnp.reshape(scale, (-1, 1, 1, 1))

    # g: the query heads that share KV head k. b: sample, w: beam, t: context token, s: step.
    grouped = q.reshape(batch, width, kv_heads, heads // kv_heads, head_dim)
    of_context = _einsum("bwkgd,btkd->bwkgt", grouped, k_context).reshape(batch, width, heads, -1)
    of_beam = _einsum("bwhd,bhswd->bwhs", q, k_beam)
    logits = jnp.concatenate([of_context, of_beam], axis=-1) * scale
    if static.soft_cap is not None:
        logits = static.soft_cap * jnp.tanh(logits / static.soft_cap)
    valid = jnp.concatenate(
        [
            jnp.broadcast_to(context_valid[:, None, None], of_context.shape),
            jnp.moveaxis(beam_valid, 3, 1),
        ],
        axis=-1,
    )
    logits = jnp.where(valid, logits, -jnp.inf)

    peak = jnp.max(logits, axis=-1, keepdims=True)
    # A row with nothing to attend to has peak -inf; 0 in its place keeps the weights 0, not NaN.
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(peak), 0.0, peak))
    total = jnp.sum(weights, axis=-1)
    context_weights, beam_weights = jnp.split(weights, [of_context.shape[-1]], axis=-1)
    grouped_weights = context_weights.reshape(*grouped.shape[:-1], -1)
    out = _einsum("bwkgt,btkd->bwkgd", grouped_weights, v_context).reshape(q.shape)
    out += _einsum("bwhs,bhswd->bwhd", beam_weights, v_beam)
    out /= jnp.where(total == 0.0, 1.0, total)[..., None]
    lse = jnp.where(total == 0.0, -jnp.inf, peak[..., 0] + jnp.log(total))

    if "sink" in operands:
        sink = operands["sink"].reshape(-1, 1, heads)
        out = apply_sink(out, lse, sink)
    return out.astype(operands["q"].dtype), lse


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision="highest")


def _context(operands, static):
    """The context as k, v f32 [B, T, Hkv, D] and valid [B, T]; invalid rows are zero.

    They are zeroed, not only masked: what lies beyond a length may be NaN, and 0 * NaN is NaN.
    """
    k, v = operands["k_context"], operands["v_context"]
    batch = operands["q"].shape[0]
    # Tables may promise tokens that a pool of no pages does not have.
    capacity = static.capacity if k.size else 0
    # int32 also in x64 mode, like every index that comes with a call.
    position = jnp.arange(capacity, dtype=jnp.int32)[None]
    length = jnp.full((batch, 1), capacity, jnp.int32)
    rows, in_pool = None, True
    if "block_tables" in operands:
        page_size = k.shape[1]
        pages = operands["block_tables"][:, position[0] // page_size]
        in_pool = (pages >= 0) & (pages < k.shape[0])
        # Page and offset stay apart: the number of a row may not fit into 32 bits.
        rows = (pages, position % page_size)
    elif "cu_seqlens" in operands:
        bounds = jnp.clip(operands["cu_seqlens"], 0, k.shape[0])
        length = jnp.diff(bounds).reshape(-1, 1)
        rows = (bounds[:, :-1].reshape(-1, 1) + position,)
    if "seqused" in operands:
        length = jnp.minimum(length, operands["seqused"][:, None])
    valid = in_pool & (position < length)

    def gather(pool):
        if rows is not None:
            pool = pool.at[rows].get(mode="clip")
        return jnp.where(valid[..., None, None], pool.astype(jnp.float32), 0.0)

    return gather(k), gather(v), valid


def _beam(operands):
    """Each beam's ancestors as k, v f32 [B, Hq, S, W, D] and valid [B, Hq, S, W]."""
    k, v = operands["k_beam"], operands["v_beam"]
    heads, kv_heads = operands["q"].shape[2], k.shape[2]
    rows = operands["topk_indices"]
    steps = rows.shape[2] if k.shape[1] else 0
    rows = jnp.repeat(rows[:, :, :steps], heads // rows.shape[1], axis=1)
    step = jnp.arange(steps, dtype=jnp.int32)[None, None, :, None]
    decoded = operands["decode_nums"].reshape(-1, 1, 1, 1)
    valid = (rows >= 0) & (rows < k.shape[1]) & (step < decoded)
    sample = jnp.arange(k.shape[0])[:, None, None, None]
    kv_head = (jnp.arange(heads) // (heads // kv_heads))[None, :, None, None]

    def gather(cache):
        gathered = cache.at[sample, rows, kv_head].get(mode="clip").astype(jnp.float32)
        return jnp.where(valid[..., None], gathered, 0.0)

    return gather(k), gather(v), valid
