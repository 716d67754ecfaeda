"""Beam decode attention as loops over samples, beams and heads, in float64.

Written from the interface alone, to be read beside its table of arguments. It shares nothing
with the library: no vectorised gather, no masks, only the list of keys that a row attends to.
"""

from __future__ import annotations

import numpy as np


def beam_decode_oracle(
    q,
    k_context,
    v_context,
    k_beam,
    v_beam,
    topk_indices,
    decode_nums,
    *,
    softmax_scale=None,
    seqused_k=None,
    cu_seqlens_k=None,
    block_tables=None,
    attn_sink=None,
    logits_soft_cap=None,
):
    """Returns out [B, 1, W, Hq, D] and lse [B, 1, W, Hq], both float64."""
    q, k_context, v_context, k_beam, v_beam = (
        np.asarray(x).astype(np.float64) for x in (q, k_context, v_context, k_beam, v_beam)
    )
    batch, _, width, heads, head_dim = q.shape
    group = heads // k_beam.shape[2]
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    decoded = np.broadcast_to(np.asarray(decode_nums), (batch,))

    out = np.zeros(q.shape)
    lse = np.full(q.shape[:-1], -np.inf)
    for b in range(batch):
        places = _context_places(b, k_context.shape, seqused_k, cu_seqlens_k, block_tables)
        for w in range(width):
            for h in range(heads):
                kv = h // group
                rows = _beam_rows(b, w, h, heads, k_beam.shape[1], topk_indices, decoded[b])
                keys = [k_context[place][kv] for place in places]
                keys += [k_beam[b, row, kv] for row in rows]
                values = [v_context[place][kv] for place in places]
                values += [v_beam[b, row, kv] for row in rows]
                sink = -np.inf if attn_sink is None else float(attn_sink[h])
                out[b, 0, w, h], lse[b, 0, w, h] = _attend(
                    q[b, 0, w, h], keys, values, scale, logits_soft_cap, sink
                )
    return out, lse


def _context_places(b, shape, seqused_k, cu_seqlens_k, block_tables):
    """Where the valid tokens of sample b lie in the context cache: leading indices into it."""
    if cu_seqlens_k is not None:
        first, last = (min(max(int(bound), 0), shape[0]) for bound in cu_seqlens_k[b : b + 2])
        return [(row,) for row in range(first, last)]
    if block_tables is not None:
        pages, page_size = shape[:2]
        length = min(int(seqused_k[b]), len(block_tables[b]) * page_size)
        tokens = [
            (int(block_tables[b][token // page_size]), token % page_size) for token in range(length)
        ]
        return [(page, offset) for page, offset in tokens if 0 <= page < pages]
    length = shape[1] if seqused_k is None else min(int(seqused_k[b]), shape[1])
    return [(b, token) for token in range(length)]


def _beam_rows(b, w, h, heads, s_beam, topk_indices, decoded):
    """The rows of the beam cache that head h of beam w attends to, in the order of the steps."""
    _, _, index_heads, max_decode_nums, _ = topk_indices.shape
    index_head = h // (heads // index_heads)
    rows = [
        int(topk_indices[b, 0, index_head, step, w])
        for step in range(min(int(decoded), max_decode_nums))
    ]
    return [row for row in rows if 0 <= row < s_beam]


def _attend(q, keys, values, scale, soft_cap, sink):
    """One query over its keys: (out, lse), the sink being in the denominator of out only."""
    if not keys:
        return np.zeros_like(q), -np.inf
    logits = np.array([scale * np.dot(q, key) for key in keys])
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    if sink == np.inf:
        return np.zeros_like(q), lse
    peak = max(logits.max(), sink)
    weights = np.exp(logits - peak)
    denominator = weights.sum() + np.exp(sink - peak)
    out = np.zeros_like(q)
    for weight, value in zip(weights, values, strict=True):
        out += weight / denominator * value
    return out, lse
