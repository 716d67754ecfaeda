"""The public function: arguments, their checks, and the canonical form of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jax_beam_attn._core import checks
from jax_beam_attn.sparse_mla.cache import BYTE_DTYPES, MODEL1, V32, as_blocks, as_tokens
from jax_beam_attn.sparse_mla.op import SparseMlaStatic, sparse_mla
from jax_beam_attn.sparse_mla.plan import SparseMlaPlan
from jax_beam_attn.sparse_mla.schedule import MlaSchedule

_MAX_HEADS = 128


def sparse_mla_decode(
    q: jax.Array,
    kv_cache: jax.Array,
    indices: jax.Array,
    *,
    page_size: int | None = None,
    topk_length: jax.Array | None = None,
    attn_sink: jax.Array | None = None,
    extra_kv_cache: jax.Array | None = None,
    extra_indices: jax.Array | None = None,
    extra_topk_length: jax.Array | None = None,
    extra_page_size: int | None = None,
    softmax_scale: float | jax.Array | None = None,
    schedule: MlaSchedule | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    plan: SparseMlaPlan | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Multi-head latent attention of decode steps over selected tokens of a paged cache.

    All heads of a query attend to the same listed tokens. A token's key is its whole cache row,
    its value the first 512 dimensions of it. `int` is int32, or int64 in x64 mode (clamped into
    int32's range).

    Args:
        q: bf16 [B, Sq, Hq, Dqk], Hq from 1 to 128; Dqk is 576 for a "v32" cache, 512 for a
            "model1" cache, either for a bf16 one.
        kv_cache: uint8, int8 or float8_e4m3fn [num_blocks, page_size, 1, 656 (v32) or 584
            (model1)], or padded blocks [num_blocks, block_bytes] with `page_size`; or bf16
            [num_blocks, page_size, 1, Dqk]. See `pack_mla_cache` for the formats.
        indices: int [B, Sq, topk], slots: block * page_size + offset. A slot outside the cache
            is masked; one listed twice counts twice.
        page_size: Tokens of a padded block.
        topk_length: int [B] or [B, Sq]: indices past it are ignored.
        attn_sink: f32 [Hq], one more logit in the denominator.
        extra_kv_cache: A second cache in the same format; one softmax runs over both.
        extra_indices: int [B, Sq, extra_topk], its slots.
        extra_topk_length: int [B] or [B, Sq].
        extra_page_size: Tokens of its padded blocks.
        softmax_scale: A Python number > 0 is compiled in, a 0-d array is read at run time.
            Default Dqk**-0.5.
        schedule: From `mla_schedule`, shared by the layers of a step; without it the call makes
            its own. It only says which thread block does what: one made for other lengths gives
            the same result, not as fast, and under vmap, or where rows are many enough to need no
            cutting, it is not used.
        return_lse: Also return the logsumexp of the logits.
        implementation: None for the best that supports the call, or "reference", "triton"; one
            that cannot serve the call raises. `python -m jax_beam_attn info` lists what this
            machine can run.
        plan: Overrides launch choices. How rows are cut depends on the batch, and so do a row's
            last bits; a plan with `num_splits` removes that.

    Returns:
        bf16 [B, Sq, Hq, 512]; with `return_lse`, also f32 [B, Sq, Hq], the natural logarithm of
        the denominator without the sink. A row with nothing to attend to is 0 with LSE -inf.
        Kernels round a key times its scale to bf16: where v32 scales are not powers of two, that
        moves the LSE by up to 1e-2.

    Raises:
        ValueError: For a wrong shape or value, or a schedule made for another shape.
        TypeError: For a wrong dtype.
        NotImplementedError: When differentiated; the operator is forward-only.

    Source: the interface is that of FlashMLA's sparse FP8 decode.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jax_beam_attn import pack_mla_cache, sparse_mla_decode
        >>> keys = jax.random.normal(jax.random.key(0), (2, 64, 1, 576))
        >>> q = jax.random.normal(jax.random.key(1), (1, 1, 16, 576), jnp.bfloat16)
        >>> indices = jnp.array([[[3, 70, -1]]])  # two tokens, and a masked entry
        >>> sparse_mla_decode(q, pack_mla_cache(keys, "v32"), indices).shape
        (1, 1, 16, 512)
    """
    checks.dtype("q", q, (jnp.bfloat16,))
    checks.shape("q", q, ("B", "Sq", "Hq", "Dqk"))
    batch, seqlen_q, heads, head_dim = q.shape
    checks.one_of("q's head size Dqk", head_dim, (V32.head_dim, MODEL1.head_dim))
    if not 1 <= heads <= _MAX_HEADS:
        raise ValueError(f"q: got Hq = {heads}, expected 1 to {_MAX_HEADS} heads")
    checks.dtype("kv_cache", kv_cache, (*BYTE_DTYPES, jnp.bfloat16))
    format = "bf16" if kv_cache.dtype == jnp.bfloat16 else _FP8_FORMAT[head_dim].name

    operands, page_size = _cache_operands("", format, q, kv_cache, indices, topk_length, page_size)
    if extra_kv_cache is not None:
        if extra_indices is None:
            raise ValueError("extra_indices: got None, expected an array with extra_kv_cache")
        extra, extra_page_size = _cache_operands(
            "extra_", format, q, extra_kv_cache, extra_indices, extra_topk_length, extra_page_size
        )
        operands |= extra
    else:
        for name, value in (
            ("extra_indices", extra_indices),
            ("extra_topk_length", extra_topk_length),
            ("extra_page_size", extra_page_size),
        ):
            if value is not None:
                raise ValueError(f"{name}: got a value without extra_kv_cache, expected None")
    static_scale, operands["scale"] = checks.softmax_scale(softmax_scale, head_dim)
    if attn_sink is not None:
        operands["sink"] = checks.float32("attn_sink", attn_sink, (heads,))
    if not isinstance(plan, SparseMlaPlan | None):
        raise TypeError(f"plan: got {type(plan).__name__}, expected SparseMlaPlan or None")
    topk, extra_topk = (
        operands[name].shape[2] if name in operands else 0 for name in ("indices", "extra_indices")
    )
    if schedule is not None:
        _check_schedule(schedule, (batch, seqlen_q, heads, topk, extra_topk))
        operands |= {"begin": schedule.begin, "first_slot": schedule.first_slot}

    out, lse = sparse_mla(
        {"q": q} | operands,
        SparseMlaStatic(format, static_scale, page_size, extra_page_size or 0),
        implementation=implementation,
        plan=plan,
    )
    return (out, lse) if return_lse else out


_FP8_FORMAT = {layout.head_dim: layout for layout in (V32, MODEL1)}


def _cache_operands(prefix, format, q, cache, indices, length, page_size):
    """A cache with its indices and lengths as operands, and its page size."""
    batch, seqlen_q, _, head_dim = q.shape
    name = f"{prefix}kv_cache"
    if format == "bf16":
        blocks, page_size = as_tokens(name, cache, page_size)
        if blocks.shape[2] != head_dim:
            raise ValueError(f"{name}: got Dqk = {blocks.shape[2]}, expected q's {head_dim}")
    else:
        blocks, page_size = as_blocks(name, cache, _FP8_FORMAT[head_dim], page_size)
    slots = checks.int32(f"{prefix}indices", indices)
    checks.shape(f"{prefix}indices", slots, (batch, seqlen_q, "topk"))
    if length is not None:
        length = checks.int32(f"{prefix}topk_length", length)
        shape = (batch,) if length.ndim == 1 else (batch, seqlen_q)
        checks.shape(f"{prefix}topk_length", length, shape)
    operands = {
        f"{prefix}cache": blocks,
        f"{prefix}indices": slots,
        f"{prefix}topk_length": length,
    }
    return operands, page_size


def _check_schedule(schedule, expected) -> None:
    if not isinstance(schedule, MlaSchedule):
        raise TypeError(f"schedule: got {type(schedule).__name__}, expected MlaSchedule or None")
    names = ("batch", "seqlen_q", "num_heads", "topk", "extra_topk")
    got = tuple(getattr(schedule, name) for name in names)
    if got != expected:
        made = ", ".join(f"{n}={v}" for n, v in zip(names, got, strict=True))
        wanted = ", ".join(f"{n}={v}" for n, v in zip(names, expected, strict=True))
        raise ValueError(f"schedule: got one made for {made}, expected {wanted}")
