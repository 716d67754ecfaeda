"""The cache format byte by byte, and TurboQuant attention as loops, in float64.

Written from the interface alone, to be read beside its section on TurboQuant. It shares nothing
with the library but the sizes in a format's fields: every code is taken from its own bits.
"""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def sizes(format):
    """KD, VD, F and the bytes of a slot."""
    key = math.ceil(format.head_dim * format.key_bits / 8)
    value = math.ceil(format.head_dim * format.value_bits / 8)
    fields = 2 if format.key_bits == 8 else 3
    slot = key + value + 2 * fields
    return key, value, fields, slot + slot % 2


def places(format, offset: int, head: int) -> tuple[int, list[int]]:
    """The byte of a block where a token's data begins, and those of its metadata fields."""
    key, value, fields, _ = sizes(format)
    heads, block_size = format.num_kv_heads, format.block_size
    data = (offset * heads + head) * (key + value)
    region = block_size * heads * (key + value)
    return data, [
        region + 2 * ((head * fields + field) * block_size + offset) for field in range(fields)
    ]


def token_places(format, offset: int) -> np.ndarray:
    """Every byte of a block that belongs to a token."""
    key, value, *_ = sizes(format)
    found = []
    for head in range(format.num_kv_heads):
        data, metadata = places(format, offset, head)
        found += range(data, data + key + value)
        found += [byte + i for byte in metadata for i in range(2)]
    return np.array(found)


def codes_of(data: bytes, bits: int) -> list[int]:
    """Eight 3-bit codes lie in 24 bits, code i at bit 3i; of two 4-bit codes the low is first."""
    if bits == 4:
        return [code for byte in data for code in (byte & 15, byte >> 4)]
    return [
        int.from_bytes(data[i : i + 3], "little") >> (3 * j) & 7
        for i in range(0, len(data), 3)
        for j in range(8)
    ]


def bytes_of(codes, bits: int) -> bytes:
    codes = [int(code) for code in codes]
    if bits == 4:
        return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    groups = [codes[i : i + 8] for i in range(0, len(codes), 8)]
    return b"".join(
        sum(code << (3 * j) for j, code in enumerate(group)).to_bytes(3, "little")
        for group in groups
    )


def decode_token(block: bytes, offset: int, head: int, format, centroids):
    """The key as stored and the value of a token, float64 [D] each."""
    key_bytes, value_bytes, *_ = sizes(format)
    data, metadata = places(format, offset, head)
    fields = [float(struct.unpack("<e", block[byte : byte + 2])[0]) for byte in metadata]
    key_data = block[data : data + key_bytes]
    value_data = block[data + key_bytes : data + key_bytes + value_bytes]
    if format.key_bits == 8:
        key = np.frombuffer(key_data, E4M3).astype(np.float64)
    else:
        norm, *fields = fields
        codes = codes_of(key_data, format.key_bits)
        key = np.array([float(centroids[code]) for code in codes]) * norm
    scale, zero = fields
    return key, np.array([code * scale + zero for code in codes_of(value_data, format.value_bits)])


def dequantized(cache, format, centroids):
    """Keys and values of a whole cache, float64 [num_blocks, block_size, Hkv, D] each."""
    shape = (len(cache), format.block_size, format.num_kv_heads, format.head_dim)
    keys, values = np.zeros(shape), np.zeros(shape)
    for number, block in enumerate(cache):
        for offset in range(format.block_size):
            for head in range(format.num_kv_heads):
                at = number, offset, head
                keys[at], values[at] = decode_token(
                    block.tobytes(), offset, head, format, centroids
                )
    return keys, values


def encode_key(key, format, rotation, centroids):
    """Codes of a key [D], its stored norm, and how far each code is from being another.

    The distance is that of the coordinate to the nearest midpoint, relative to the largest
    centroid.
    """
    key = np.asarray(key, np.float64)
    centroids = np.asarray(centroids, np.float64)
    norm = math.sqrt((key**2).sum())
    rotated = np.asarray(rotation, np.float64) @ (key / (norm + 1e-8))
    midpoints = (centroids[1:] + centroids[:-1]) / 2
    codes = (rotated[:, None] >= midpoints).sum(axis=1)
    margin = np.abs(rotated[:, None] - midpoints).min(axis=1) / np.abs(centroids).max()
    if format.norm_correction:
        norm /= math.sqrt((centroids[codes] ** 2).sum() + 1e-16)
    return codes, min(norm, 65504.0), margin


def encode_value(value, bits):
    """Codes of a value [D], scale and zero, and how far each code is from being another."""
    value = np.asarray(value, np.float64)
    top = 2**bits - 1
    low = np.clip(value.min(), -65504.0, 65504.0)
    scale = np.clip((value.max() - low) / top, 1e-8, 65504.0)
    exact = (value - low) / scale + 0.5
    codes = np.clip(np.floor(exact), 0, top).astype(int)
    return codes, scale, low, np.abs(exact - np.round(exact))


def attention(
    query,
    kv_cache,
    block_table,
    seq_lens,
    query_start_loc=None,
    *,
    format,
    rotation,
    centroids,
    softmax_scale=None,
    sinks=None,
    sliding_window=None,
    logits_soft_cap=None,
):
    """Returns out [T, Hq, D] and lse [T, Hq], both float64; one token a request without bounds."""
    query, kv_cache = np.asarray(query).astype(np.float64), np.asarray(kv_cache)
    tokens, heads, head_dim = query.shape
    if query_start_loc is None:
        query_start_loc = np.arange(len(seq_lens) + 1)
    scale = head_dim**-0.5 if softmax_scale is None else float(softmax_scale)
    out = np.zeros((tokens, heads, head_dim))
    lse = np.full((tokens, heads), -np.inf)
    capacity = np.shape(block_table)[1] * format.block_size
    for s, length in enumerate(np.asarray(seq_lens)):
        length = min(max(int(length), 0), capacity)
        start, end = (int(x) for x in query_start_loc[s : s + 2])
        cached = _request(kv_cache, np.asarray(block_table)[s], length, format, centroids)
        for token in range(max(start, 0), min(end, tokens)):
            last = length - (end - token)
            first = 0 if sliding_window is None else last - sliding_window + 1
            for head in range(heads):
                q = query[token, head]
                if format.key_bits != 8:
                    q = np.asarray(rotation, np.float64) @ q
                kv_head = head // (heads // format.num_kv_heads)
                seen = [kv[kv_head] for p, kv in cached if first <= p <= last]
                sink = -np.inf if sinks is None else float(sinks[head])
                out[token, head], lse[token, head] = _attend(q, seen, scale, sink, logits_soft_cap)
    return out, lse


def _request(cache, table, length, format, centroids):
    """(position, [(key, value) of each KV head]) of each token that is there."""
    found = []
    for position in range(length):
        block, offset = int(table[position // format.block_size]), position % format.block_size
        if 0 <= block < len(cache):
            data = cache[block].tobytes()
            heads = range(format.num_kv_heads)
            found.append(
                (position, [decode_token(data, offset, h, format, centroids) for h in heads])
            )
    return found


def _attend(q, seen, scale, sink, cap):
    """One query over its keys: (out, lse), the sink being in the denominator of out only."""
    if not seen:
        return np.zeros(len(q)), -np.inf
    keys, values = (np.stack(part) for part in zip(*seen, strict=True))
    logits = scale * (keys @ q)
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    lse = logits.max() + np.log(np.exp(logits - logits.max()).sum())
    if sink == np.inf:
        return np.zeros(len(q)), lse
    peak = max(logits.max(), sink)
    weights = np.exp(logits - peak)
    return weights @ values / (weights.sum() + np.exp(sink - peak)), lse
