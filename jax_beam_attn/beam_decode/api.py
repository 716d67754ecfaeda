"""The public function: arguments, their checks, and the canonical form of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_beam_attn._core import checks
from jax_beam_attn.beam_decode.op import BeamDecodeStatic, beam_decode
from jax_beam_attn.beam_decode.plan import BeamDecodePlan

_MAX_HEAD_DIM = 256


def beam_decode_attn(
    q: jax.Array,
    k_context: jax.Array,
    v_context: jax.Array,
    k_beam: jax.Array,
    v_beam: jax.Array,
    topk_indices: jax.Array,
    decode_nums: int | jax.Array,
    *,
    softmax_scale: float | jax.Array | None = None,
    return_lse: bool = False,
    seqused_k: jax.Array | None = None,
    cu_seqlens_k: jax.Array | None = None,
    block_tables: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | None = None,
    plan: BeamDecodePlan | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of one decode step of beam search.

    The W beams of a sample share one context KV cache; what each beam has decoded itself lies
    in the beam cache, where `topk_indices` names one row for each step. One softmax runs over
    both. A beam search therefore never reorders or copies a KV cache: it only permutes
    `topk_indices`.

    B is the batch, W the beams, Hq and Hkv the query and KV heads (Hq a multiple of Hkv), D the
    head size. `int` is int32, or int64 in x64 mode (clamped into int32's range).

    Args:
        q: [B, 1, W, Hq, D], bf16, fp16 or f32; D a multiple of 8, at most 256.
        k_context: The shared context's keys, in q's dtype. Dense [B, Sk, Hkv, D]; jagged
            [total, Hkv, D] with `cu_seqlens_k`; or paged [num_pages, page_size, Hkv, D] with
            `block_tables` and `seqused_k`.
        v_context: Its values, in the same form.
        k_beam: [B, S_beam, Hkv, D], rows of keys of decoded tokens; in a plain beam search
            S_beam = steps * W and row = step * W + beam.
        v_beam: The values, likewise.
        topk_indices: int [B, 1, H, max_decode_nums, W] with H one of 1, Hkv, Hq: the row of
            `k_beam` that beam w attends to for step s. A row outside [0, S_beam) is masked; a
            row named twice counts twice.
        decode_nums: int, int [] or int [B]: steps s < decode_nums count. May be traced: one
            executable serves a whole decode loop. The current token's KV must be in the beam
            cache already.
        softmax_scale: A Python number > 0 is compiled in, a 0-d array is read at run time.
            Default D**-0.5.
        return_lse: Also return the logsumexp of the logits.
        seqused_k: int [B], the valid length of each sample's context (dense, paged). What lies
            beyond never changes a bit of the result.
        cu_seqlens_k: int [B + 1], sample b being rows cu_seqlens_k[b] to cu_seqlens_k[b + 1].
        block_tables: int [B, max_pages], the pages of each sample; a page outside the pool is
            masked.
        attn_sink: f32 [Hq], one more logit in the denominator.
        logits_soft_cap: A Python number c > 0: logits become c * tanh(logit / c).
        implementation: None for the best that supports the call, or "reference", "triton",
            "cute"; one that cannot serve the call raises. `python -m jax_beam_attn info` lists
            what this machine can run.
        plan: Overrides launch choices. The number of splits depends on the batch, and so do a
            row's last bits. A plan with `num_splits` removes that; with a jagged context, whose
            longest possible sample depends on the batch too, only `num_splits=1` does.

    Returns:
        [B, 1, W, Hq, D] in q's dtype; with `return_lse`, also f32 [B, 1, W, Hq], the natural
        logarithm of the denominator without the sink. A row with nothing to attend to is 0 with
        LSE -inf.

    Raises:
        ValueError: For a wrong shape or value. Values known only at run time do not raise:
            lengths and `decode_nums` are clamped to what is there.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated; the operator is forward-only.

    Source: the interface is that of `gr_decode_atten` in NVIDIA's recsys-examples.

    Example:
        Two beams share a context of three tokens and have decoded one token each.

        >>> import jax, jax.numpy as jnp
        >>> from jax_beam_attn import beam_decode_attn
        >>> keys = jax.random.split(jax.random.key(0), 5)
        >>> q = jax.random.normal(keys[0], (1, 1, 2, 4, 8))
        >>> context = [jax.random.normal(key, (1, 3, 2, 8)) for key in keys[1:3]]
        >>> beam = [jax.random.normal(key, (1, 2, 2, 8)) for key in keys[3:5]]
        >>> rows = jnp.array([0, 1]).reshape(1, 1, 1, 1, 2)  # step 0: each beam its own row
        >>> step = jax.jit(beam_decode_attn)
        >>> step(q, *context, *beam, rows, 1).shape
        (1, 1, 2, 4, 8)
    """
    checks.dtype("q", q, (jnp.bfloat16, jnp.float16, jnp.float32))
    checks.shape("q", q, ("B", 1, "W", "Hq", "D"))
    batch, _, width, heads, head_dim = q.shape
    checks.multiple_of("q's head size D", head_dim, "the required divisor", 8)
    if head_dim > _MAX_HEAD_DIM:
        raise ValueError(f"q: got head size D = {head_dim}, expected at most {_MAX_HEAD_DIM}")

    context, capacity, total = _check_context(
        batch, head_dim, k_context, seqused_k, cu_seqlens_k, block_tables
    )
    kv_heads = k_context.shape[-2]
    checks.multiple_of("q's heads Hq", heads, "Hkv", kv_heads)
    checks.shape("v_context", v_context, k_context.shape)
    checks.shape("k_beam", k_beam, (batch, "S_beam", kv_heads, head_dim))
    checks.shape("v_beam", v_beam, k_beam.shape)
    for name, array in (
        ("k_context", k_context),
        ("v_context", v_context),
        ("k_beam", k_beam),
        ("v_beam", v_beam),
    ):
        checks.dtype(name, array, (q.dtype,))

    topk_indices = checks.int32("topk_indices", topk_indices)
    checks.shape("topk_indices", topk_indices, (batch, 1, "H", "max_decode_nums", width))
    checks.one_of("topk_indices' axis H", topk_indices.shape[2], (1, kv_heads, heads))
    decode_nums = checks.int32("decode_nums", decode_nums)
    if decode_nums.ndim:
        checks.shape("decode_nums", decode_nums, (batch,))
    static_scale, traced_scale = checks.softmax_scale(softmax_scale, head_dim)
    if attn_sink is not None:
        attn_sink = checks.float32("attn_sink", attn_sink, (heads,))
    if logits_soft_cap is not None:
        logits_soft_cap = checks.positive("logits_soft_cap", logits_soft_cap)
    if not isinstance(plan, BeamDecodePlan | None):
        raise TypeError(f"plan: got {type(plan).__name__}, expected BeamDecodePlan or None")

    out, lse = beam_decode(
        {
            "q": q.reshape(batch, width, heads, head_dim),
            "k_context": k_context,
            "v_context": v_context,
            "k_beam": k_beam,
            "v_beam": v_beam,
            "topk_indices": topk_indices.reshape(batch, *topk_indices.shape[2:]),
            "decode_nums": decode_nums,
            **context,
            "sink": attn_sink,
            "scale": traced_scale,
        },
        BeamDecodeStatic(static_scale, logits_soft_cap, capacity, total),
        implementation=implementation,
        plan=plan,
    )
    out = out.reshape(q.shape)
    return (out, lse.reshape(q.shape[:-1])) if return_lse else out


def _check_context(batch, head_dim, k_context, seqused_k, cu_seqlens_k, block_tables):
    """Which form the context has: its index operands, and its tokens per sample and in all."""
    if cu_seqlens_k is not None:
        for name, other in (("seqused_k", seqused_k), ("block_tables", block_tables)):
            if other is not None:
                raise ValueError(f"{name}: got an array beside cu_seqlens_k, expected None")
        checks.shape("k_context", k_context, ("total", "Hkv", head_dim))
        bounds = checks.int32("cu_seqlens_k", cu_seqlens_k)
        checks.shape("cu_seqlens_k", bounds, (batch + 1,))
        total = k_context.shape[0]
        _check_rows("k_context", total)
        return {"cu_seqlens": bounds.reshape(1, -1)}, total, total

    index = {}
    if block_tables is not None:
        if seqused_k is None:
            raise ValueError("seqused_k: got None, expected int [B] with block_tables")
        checks.shape("k_context", k_context, ("num_pages", "page_size", "Hkv", head_dim))
        index["block_tables"] = checks.int32("block_tables", block_tables)
        checks.shape("block_tables", index["block_tables"], (batch, "max_pages"))
        capacity = index["block_tables"].shape[1] * k_context.shape[1]
    else:
        checks.shape("k_context", k_context, (batch, "Sk", "Hkv", head_dim))
        capacity = k_context.shape[1]
    if seqused_k is not None:
        index["seqused"] = checks.int32("seqused_k", seqused_k)
        checks.shape("seqused_k", index["seqused"], (batch,))
    _check_rows("k_context", k_context.shape[0] * k_context.shape[1])
    _check_rows("block_tables" if block_tables is not None else "k_context", capacity)
    return index, capacity, batch * capacity


def _check_rows(name: str, rows: int) -> None:
    """Requires that int32 counts the tokens that an operand has, or has room for."""
    if rows > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{name}: got room for {rows} tokens, expected less than 2**31")
