"""The public functions: arguments, their checks, and the canonical form of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_beam_attn._core import checks
from jax_beam_attn.turboquant.cache import (
    TurboQuantFormat,
    check_cache,
    check_codebook,
    check_format,
)
from jax_beam_attn.turboquant.op import TurboQuantStatic, turboquant
from jax_beam_attn.turboquant.plan import TurboQuantPlan


def turboquant_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    format: TurboQuantFormat,
    rotation: jax.Array | None,
    centroids: jax.Array | None,
    softmax_scale: float | jax.Array | None = None,
    sinks: jax.Array | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    plan: TurboQuantPlan | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of a batch of requests over a quantised paged cache, causal.

    Decoding, verifying a few speculated tokens, prefill in chunks or whole, and any mixture of
    them are one call. Only the cache is read: the new tokens are stored first, see
    `turboquant_store`. Token t of a request with q new tokens and length n, these included, sees
    the first n - q + t + 1 keys.

    S is the number of requests, Hq and Hkv are the query and KV heads (Hq a multiple of Hkv), D is
    the head size. `int` is int32, or int64 in x64 mode (clamped into int32's range).

    Args:
        query: [num_tokens, Hq, D], bf16, fp16 or f32, not rotated.
        kv_cache: uint8 [num_blocks, block_size, Hkv, slot_bytes].
        block_table: int [S, max_blocks], the blocks of each request; a block outside the cache is
            masked.
        seq_lens: int [S], cached tokens of each request. What lies beyond never changes a bit of
            the result.
        query_start_loc: int [S + 1], ascending: request s has the tokens query_start_loc[s] to
            query_start_loc[s + 1].
        format: The cache's format.
        rotation: The orthogonal matrix f32 [D, D] that the keys were stored with; ignored for FP8
            keys.
        centroids: Their codebook, f32 [2**key_bits]; ignored for FP8 keys.
        softmax_scale: A Python number > 0 is compiled in, a 0-d array is read at run time.
            Default D**-0.5.
        sinks: f32 [Hq], one more logit in the denominator.
        sliding_window: A Python integer w >= 1: a query sees itself and the w - 1 keys before it.
        logits_soft_cap: A Python number c > 0: logits become c * tanh(logit / c).
        max_query_len: The most tokens of a request, for the choice of a plan; a longer one is
            served too. Default num_tokens.
        max_seq_len: The longest request, likewise. Default what the block table can hold.
        return_lse: Also return the logsumexp of the logits.
        implementation: None for the best that supports the call, or "reference", "triton"; one
            that cannot serve the call raises. `python -m jax_beam_attn info` lists what this
            machine can run.
        plan: Overrides launch choices. The number of splits depends on the batch, and so do a
            row's last bits; a plan with `num_splits` removes that.

    Returns:
        [num_tokens, Hq, D] in the query's dtype; with `return_lse`, also f32 [num_tokens, Hq],
        the natural logarithm of the denominator without the sink. A row with nothing to attend
        to, or of no request, is 0 with LSE -inf.

    Raises:
        ValueError: For a wrong shape or value. Values known only at run time do not raise:
            lengths are clamped to what the block table can hold.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated; the operator is forward-only.

    Source: `triton_turboquant_unified_attention` of vLLM.

    Example:
        One request of 20 cached tokens, of which the last two are new.

        >>> import jax, jax.numpy as jnp
        >>> from jax_beam_attn import TurboQuantFormat, turboquant_attention
        >>> from jax_beam_attn import hadamard_rotation, lloyd_max_centroids
        >>> format = TurboQuantFormat.preset("3bit_nc", head_dim=64, num_kv_heads=2, block_size=16)
        >>> cache = jnp.zeros(format.cache_shape(4), jnp.uint8)
        >>> query = jax.random.normal(jax.random.key(0), (2, 8, 64))
        >>> table, lengths, start = jnp.array([[3, 1]]), jnp.array([20]), jnp.array([0, 2])
        >>> codebook = {"rotation": hadamard_rotation(64), "centroids": lloyd_max_centroids(3, 64)}
        >>> call = query, cache, table, lengths, start
        >>> turboquant_attention(*call, format=format, **codebook).shape
        (2, 8, 64)
    """
    bounds = checks.int32("query_start_loc", query_start_loc)
    checks.shape("query_start_loc", bounds, ("S + 1",))
    if bounds.shape[0] == 0:
        raise ValueError("query_start_loc: got shape (0,), expected [S + 1]")
    return _attention(
        query,
        kv_cache,
        block_table,
        seq_lens,
        bounds,
        format,
        rotation,
        centroids,
        softmax_scale,
        sinks,
        sliding_window,
        logits_soft_cap,
        max_query_len,
        max_seq_len,
        return_lse,
        implementation,
        plan,
    )


def turboquant_decode_attention(
    query: jax.Array,
    kv_cache: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    *,
    format: TurboQuantFormat,
    rotation: jax.Array | None,
    centroids: jax.Array | None,
    softmax_scale: float | jax.Array | None = None,
    sinks: jax.Array | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    plan: TurboQuantPlan | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`turboquant_attention` of one token of each request.

    Args:
        query: [B, Hq, D], bf16, fp16 or f32, not rotated.
        kv_cache: See `turboquant_attention`, as for all that follow.
        block_table: int [B, max_blocks].
        seq_lens: int [B]; a request of length 0 has result 0.
        format: The cache's format.
        rotation: f32 [D, D].
        centroids: f32 [2**key_bits].
        softmax_scale: Default D**-0.5.
        sinks: f32 [Hq].
        sliding_window: A Python integer >= 1.
        logits_soft_cap: A Python number > 0.
        max_query_len: As in `turboquant_attention`; without effect, each request has one token.
        max_seq_len: The longest request, for the choice of a plan.
        return_lse: Also return the logsumexp of the logits.
        implementation: None, "reference" or "triton".
        plan: Overrides launch choices.

    Returns:
        [B, Hq, D] in the query's dtype; with `return_lse`, also f32 [B, Hq].

    Raises:
        ValueError: For a wrong shape or value.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated; the operator is forward-only.

    Source: `triton_turboquant_decode_attention_soa` of vLLM.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_beam_attn import TurboQuantFormat, turboquant_decode_attention
        >>> format = TurboQuantFormat.preset("k8v4", head_dim=64, num_kv_heads=2, block_size=16)
        >>> cache = jnp.zeros(format.cache_shape(4), jnp.uint8)
        >>> query = jax.random.normal(jax.random.key(0), (1, 8, 64))
        >>> table, lengths = jnp.array([[3, 1]]), jnp.array([20])
        >>> fp8 = {"format": format, "rotation": None, "centroids": None}
        >>> turboquant_decode_attention(query, cache, table, lengths, **fp8).shape
        (1, 8, 64)
    """
    return _attention(
        query,
        kv_cache,
        block_table,
        seq_lens,
        None,
        format,
        rotation,
        centroids,
        softmax_scale,
        sinks,
        sliding_window,
        logits_soft_cap,
        max_query_len,
        max_seq_len,
        return_lse,
        implementation,
        plan,
    )


def _attention(
    query,
    kv_cache,
    block_table,
    seq_lens,
    bounds,
    format,
    rotation,
    centroids,
    softmax_scale,
    sinks,
    sliding_window,
    logits_soft_cap,
    max_query_len,
    max_seq_len,
    return_lse,
    implementation,
    plan,
):
    """Checks a call and makes it; without `bounds` each request has one token."""
    check_format(format)
    checks.dtype("query", query, (jnp.bfloat16, jnp.float16, jnp.float32))
    tokens = "num_tokens" if bounds is not None else "B"
    checks.shape("query", query, (tokens, "Hq", format.head_dim))
    tokens, heads, head_dim = query.shape
    requests = bounds.shape[0] - 1 if bounds is not None else tokens
    checks.multiple_of("query's heads Hq", heads, "format.num_kv_heads", format.num_kv_heads)
    check_cache(kv_cache, format)
    table = checks.int32("block_table", block_table)
    checks.shape("block_table", table, (requests, "max_blocks"))
    lengths = checks.int32("seq_lens", seq_lens)
    checks.shape("seq_lens", lengths, (requests,))
    capacity = table.shape[1] * format.block_size
    if capacity > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"block_table: got room for {capacity} tokens, expected less than 2**31")
    codebook = check_codebook(rotation, centroids, format)
    static_scale, traced_scale = checks.softmax_scale(softmax_scale, head_dim)
    if sinks is not None:
        sinks = checks.float32("sinks", sinks, (heads,))[None]
    if sliding_window is not None:
        checks.at_least_one("sliding_window", sliding_window)
        sliding_window = int(min(sliding_window, capacity + 1))
    if logits_soft_cap is not None:
        logits_soft_cap = checks.positive("logits_soft_cap", logits_soft_cap)
    for name, bound in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len)):
        if bound is not None:
            checks.at_least_zero(name, bound)
    if not isinstance(plan, TurboQuantPlan | None):
        raise TypeError(f"plan: got {type(plan).__name__}, expected TurboQuantPlan or None")

    out, lse = turboquant(
        {
            "q": query,
            "cache": kv_cache,
            "block_table": table,
            "seq_lens": lengths,
            "query_start": bounds[None] if bounds is not None else None,
            **codebook,
            "sink": sinks,
            "scale": traced_scale[None] if traced_scale is not None else None,
        },
        TurboQuantStatic(
            format,
            static_scale,
            logits_soft_cap,
            sliding_window,
            _most_tokens(tokens, bounds, max_query_len),
            capacity if max_seq_len is None else min(int(max_seq_len), capacity),
        ),
        implementation=implementation,
        plan=plan,
    )
    return (out, lse) if return_lse else out


def _most_tokens(tokens: int, bounds, max_query_len: int | None) -> int:
    """The most tokens of a request, as far as is known."""
    if bounds is None:
        return 1
    return tokens if max_query_len is None else min(int(max_query_len), tokens)
