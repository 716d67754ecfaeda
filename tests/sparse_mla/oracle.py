"""The cache formats byte by byte, and sparse MLA decode as loops, in float64.

Written from the interface alone, to be read beside its list of formats and table of arguments. It
shares nothing with the library: every token is taken from its own bytes.
"""

from __future__ import annotations

import struct

import ml_dtypes
import numpy as np

VALUE_DIM = 512
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
TOKEN_BYTES = {"v32": 656, "model1": 584}
HEAD_DIM = {"v32": 576, "model1": 512}


def _numbers(data: bytes, dtype) -> np.ndarray:
    return np.frombuffer(data, dtype).astype(np.float64)


def token_v32(block: bytes, offset: int, page_size: int) -> np.ndarray:
    """Key [576] of a token: 512 e4m3, four f32 scales, 64 bf16."""
    token = block[656 * offset : 656 * (offset + 1)]
    scales = struct.unpack("<4f", token[512:528])
    groups = [_numbers(token[128 * g : 128 * (g + 1)], E4M3) * s for g, s in enumerate(scales)]
    return np.concatenate([*groups, _numbers(token[528:656], BF16)])


def token_model1(block: bytes, offset: int, page_size: int) -> np.ndarray:
    """Key [512] of a token: 448 e4m3 and 64 bf16 in the block's first part, then the scales."""
    row = block[576 * offset : 576 * (offset + 1)]
    first_scale = 576 * page_size + 8 * offset
    scales = [
        np.nan if byte == 255 else 2.0 ** (byte - 127)
        for byte in block[first_scale : first_scale + 7]
    ]
    groups = [_numbers(row[64 * g : 64 * (g + 1)], E4M3) * s for g, s in enumerate(scales)]
    return np.concatenate([*groups, _numbers(row[448:576], BF16)])


def token(cache: np.ndarray, format: str, slot: int, page_size: int) -> np.ndarray:
    """Key float64 [Dqk] in a slot of a cache in any form."""
    block, offset = divmod(slot, page_size)
    if format == "bf16":
        return cache[block, offset, 0].astype(np.float64)
    take = {"v32": token_v32, "model1": token_model1}[format]
    return take(cache[block].tobytes(), offset, page_size)


def unpack_oracle(cache: np.ndarray, format: str, page_size: int) -> np.ndarray:
    """All keys of a cache, float64 [num_blocks, page_size, 1, Dqk]."""
    keys = [token(cache, format, slot, page_size) for slot in range(len(cache) * page_size)]
    return np.reshape(keys, (len(cache), page_size, 1, HEAD_DIM[format]))


def quantized_token(key: np.ndarray, format: str) -> tuple[bytes, bytes]:
    """The bytes of one key [Dqk] as (its row, its scales in the block's second part)."""
    quantized, group = {"v32": (512, 128), "model1": (448, 64)}[format]
    codes, scales = [], []
    for first in range(0, quantized, group):
        values = key[first : first + group].astype(np.float32)
        amax = max(np.abs(values).max(), np.float32(1e-4))
        scale = np.float32(amax * np.float32(1 / 448))
        if format == "model1":
            mantissa, exponent = np.frexp(scale)  # mantissa in [0.5, 1)
            exponent = exponent - (mantissa == 0.5)
            scale = np.float32(2.0) ** np.float32(exponent)
            scales.append(int(exponent) + 127)
        else:
            scales.append(scale)
        codes.append(np.clip(values / scale, -448, 448).astype(E4M3).tobytes())
    rope = key[quantized:].astype(BF16).tobytes()
    if format == "v32":
        return b"".join(codes) + struct.pack("<4f", *scales) + rope, b""
    return b"".join(codes) + rope, bytes(scales) + b"\0"


def pack_oracle(kv: np.ndarray, format: str, block_bytes: int | None = None) -> np.ndarray:
    """Keys [num_blocks, page_size, 1, Dqk] as a new cache, with zeros for padding."""
    num_blocks, page_size = kv.shape[:2]
    blocks = []
    for block in kv:
        rows, scales = zip(*(quantized_token(key[0], format) for key in block), strict=True)
        data = b"".join(rows) + b"".join(scales)
        blocks.append(data.ljust(block_bytes or 0, b"\0"))
    cache = np.frombuffer(b"".join(blocks), np.uint8)
    if block_bytes is None:
        return cache.reshape(num_blocks, page_size, 1, TOKEN_BYTES[format])
    return cache.reshape(num_blocks, block_bytes)


def sparse_mla_oracle(
    q,
    kv_cache,
    indices,
    *,
    page_size=None,
    topk_length=None,
    attn_sink=None,
    extra_kv_cache=None,
    extra_indices=None,
    extra_topk_length=None,
    extra_page_size=None,
    softmax_scale=None,
):
    """Returns out [B, Sq, Hq, 512] and lse [B, Sq, Hq], both float64."""
    q, kv_cache, indices = (np.asarray(x) for x in (q, kv_cache, indices))
    batch, seqlen_q, heads, head_dim = q.shape
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    out = np.zeros((batch, seqlen_q, heads, VALUE_DIM))
    lse = np.full((batch, seqlen_q, heads), -np.inf)
    for b in range(batch):
        for s in range(seqlen_q):
            keys = _keys(b, s, head_dim, kv_cache, indices, topk_length, page_size)
            if extra_kv_cache is not None:
                extra = (np.asarray(extra_kv_cache), np.asarray(extra_indices))
                keys += _keys(b, s, head_dim, *extra, extra_topk_length, extra_page_size)
            for h in range(heads):
                sink = -np.inf if attn_sink is None else float(attn_sink[h])
                out[b, s, h], lse[b, s, h] = _attend(q[b, s, h], keys, scale, sink)
    return out, lse


def _keys(b, s, head_dim, cache, indices, lengths, page_size):
    """The keys that query (b, s) attends to, in the order in which they are listed."""
    format = "bf16" if cache.dtype == BF16 else {576: "v32", 512: "model1"}[head_dim]
    page_size = cache.shape[1] if page_size is None else page_size
    listed = indices[b, s]
    if lengths is not None:
        length = np.asarray(lengths)[b] if np.ndim(lengths) == 1 else np.asarray(lengths)[b, s]
        listed = listed[: max(int(length), 0)]
    slots = [int(slot) for slot in listed if 0 <= slot < len(cache) * page_size]
    keys = {slot: token(cache, format, slot, page_size) for slot in set(slots)}
    return [keys[slot] for slot in slots]


def _attend(q, keys, scale, sink):
    """One query over its keys: (out, lse), the sink being in the denominator of out only."""
    if not keys:
        return np.zeros(VALUE_DIM), -np.inf
    keys = np.stack(keys)
    logits = scale * (keys @ q.astype(np.float64))
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    if sink == np.inf:
        return np.zeros(VALUE_DIM), lse
    peak = max(logits.max(), sink)
    weights = np.exp(logits - peak)
    return weights @ keys[:, :VALUE_DIM] / (weights.sum() + np.exp(sink - peak)), lse
