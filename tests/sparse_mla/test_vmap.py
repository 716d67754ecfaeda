"""vmap: which operands are mapped must not matter; the loop over single calls is the judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_beam_attn import mla_schedule, sparse_mla_decode
from tests.sparse_mla.calls import STATIC, Shape, assert_same_as, check, make_call, run

SIZE = 3
FORMS = {
    "v32": Shape(heads=2, padded=True, extra_topk=4),
    "model1": Shape(heads=2, format="model1", extra_topk=4),
    "bf16": Shape(heads=2, format="bf16", extra_topk=4),
}
CACHES = ("kv_cache", "extra_kv_cache")
OPTIONAL = ("topk_length", "extra_topk_length", "attn_sink", "softmax_scale")
OPERANDS = ("q", "indices", "extra_indices", *CACHES, *OPTIONAL)


def _call(form, seed):
    """A call with every optional operand; indices reach beyond their caches."""
    rng = np.random.default_rng(seed)
    call = make_call(FORMS[form], seed)
    for name in ("indices", "extra_indices"):
        call[name] = rng.integers(-2, 16, call[name].shape, np.int32)
    call["topk_length"] = rng.integers(0, 8, 2, np.int32)
    call["extra_topk_length"] = rng.integers(0, 5, (2, 3), np.int32)
    call["attn_sink"] = rng.standard_normal(2).astype(np.float32)
    call["softmax_scale"] = np.array(rng.uniform(0.02, 0.06), np.float32)
    return call


def _arrays(call):
    return {name: x for name, x in call.items() if name not in STATIC}


def _stacked(calls):
    return {name: np.stack([call[name] for call in calls]) for name in _arrays(calls[0])}


def _looped(calls):
    """The judge, itself judged by the oracle."""
    results = [run(call) for call in calls]
    for call, result in zip(calls, results, strict=True):
        check(call, result)
    return tuple(np.stack(parts) for parts in zip(*results, strict=True))


def _function(call):
    static = {name: x for name, x in call.items() if name in STATIC}
    return lambda operands: sparse_mla_decode(return_lse=True, **operands, **static)


def _check_mapped(form, mapped, seed=0):
    """Maps some operands of SIZE calls and shares the others, which are those of the first."""
    calls = [_call(form, seed + n) for n in range(SIZE)]
    calls = [{x: call[x] if x in mapped else calls[0][x] for x in call} for call in calls]
    stacked = _stacked(calls)
    operands = {name: x if name in mapped else calls[0][name] for name, x in stacked.items()}
    axes = {name: 0 if name in mapped else None for name in operands}
    result = jax.jit(jax.vmap(_function(calls[0]), in_axes=(axes,)))(operands)
    assert_same_as(result, _looped(calls))


@pytest.mark.parametrize("form", FORMS)
def test_all_operands(form):
    _check_mapped(form, set(OPERANDS))


@pytest.mark.parametrize("name", OPERANDS)
def test_one_operand(name):
    _check_mapped("v32", {name})


@pytest.mark.parametrize("form", ["model1", "bf16"])
@pytest.mark.parametrize("mapped", [["q"], ["kv_cache"], ["extra_kv_cache", "indices"]], ids=str)
def test_pools_of_other_formats(form, mapped):
    _check_mapped(form, mapped)


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(st.sampled_from(sorted(FORMS)), st.data())
def test_any_operands(form, data):
    _check_mapped(form, data.draw(st.sets(st.sampled_from(OPERANDS), min_size=2)), seed=10)


@pytest.mark.parametrize("form", FORMS)
def test_optional_operands_absent(form):
    absent = (*OPTIONAL, "extra_kv_cache", "extra_indices", "extra_page_size")
    calls = [_call(form, seed) for seed in range(SIZE)]
    calls = [{name: x for name, x in call.items() if name not in absent} for call in calls]
    result = jax.jit(jax.vmap(_function(calls[0])))(_stacked(calls))
    assert_same_as(result, _looped(calls))


def test_mapped_axes_elsewhere():
    calls = [_call("model1", seed) for seed in range(SIZE)]
    stacked = _stacked(calls)
    axes = {name: x.ndim - 1 for name, x in stacked.items()}
    operands = {name: np.moveaxis(x, 0, axes[name]) for name, x in stacked.items()}
    result = jax.jit(jax.vmap(_function(calls[0]), in_axes=(axes,)))(operands)
    assert_same_as(result, _looped(calls))


@pytest.mark.parametrize(
    "inner, outer",
    [
        ({"q", "indices"}, {"kv_cache", "topk_length"}),
        ({"kv_cache"}, {"kv_cache", "attn_sink", "softmax_scale"}),
    ],
)
def test_nested(inner, outer):
    """Two axes, each mapping some operands: [outer 2, inner SIZE, ...]."""

    def pick(o, i):
        """The call at (o, i): operands vary only along the axes that map them."""
        seeds = {n: 10 * o * (n in outer) + i * (n in inner) for n in _call("v32", 0)}
        return {name: _call("v32", seed)[name] for name, seed in seeds.items()}

    calls = [[pick(o, i) for i in range(SIZE)] for o in range(2)]
    operands = {}
    for name in _arrays(calls[0][0]):
        x = np.stack([np.stack([call[name] for call in row]) for row in calls])
        x = x if name in inner else x[:, 0]
        operands[name] = x if name in outer else x[0]
    inner_axes, outer_axes = (
        {name: 0 if name in mapped else None for name in operands} for mapped in (inner, outer)
    )
    function = jax.vmap(_function(calls[0][0]), in_axes=(inner_axes,))
    result = jax.jit(jax.vmap(function, in_axes=(outer_axes,)))(operands)
    want = tuple(np.stack(parts) for parts in zip(*map(_looped, calls), strict=True))
    assert_same_as(result, want)


def test_with_a_schedule():
    """One of all calls, and one of each."""
    sizes = {"batch": 2, "seqlen_q": 3, "num_heads": 2, "topk": 7, "extra_topk": 4}
    calls = [_call("model1", seed) for seed in range(SIZE)]
    stacked, want = _stacked(calls), _looped(calls)
    shared = mla_schedule(**sizes)

    def function(call):
        own = mla_schedule(call["topk_length"], **sizes)
        return tuple(
            sparse_mla_decode(return_lse=True, schedule=schedule, **call)
            for schedule in (shared, own)
        )

    for result in jax.jit(jax.vmap(function))(stacked):
        assert_same_as(result, want)


@pytest.mark.parametrize("form", ["v32", "model1"])
def test_a_shared_cache_is_not_copied(form):
    """Up to the primitive, which is where kernels begin: the reference does make copies."""
    size = 4096
    call = _call(form, 0)
    mapped = {name: 0 if name in ("q", "indices") else None for name in _arrays(call)}
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape if mapped[name] is None else (size, *x.shape), x.dtype)
        for name, x in _arrays(call).items()
    }
    jaxpr = jax.make_jaxpr(jax.vmap(_function(call), in_axes=(mapped,)))(abstract).jaxpr
    assert "sparse_mla_decode" in {equation.primitive.name for equation in jaxpr.eqns}
    bytes_made = [v.aval.size for e in jaxpr.eqns for v in e.outvars if v.aval.dtype == jnp.uint8]
    assert max(bytes_made, default=0) <= call["kv_cache"].size


@pytest.mark.parametrize("form", FORMS)
def test_over_nothing(form):
    call = _call(form, 0)
    empty = {name: x[:0] for name, x in _stacked([call]).items()}
    out, lse = jax.jit(jax.vmap(_function(call)))(empty)
    assert (out.shape, lse.shape) == ((0, 2, 3, 2, 512), (0, 2, 3, 2))


def test_pools_past_32_bits_are_refused():
    """Mapped pools are laid end to end; their slots must have 32-bit numbers."""
    call = {
        name: jax.ShapeDtypeStruct((2**10, *x.shape), x.dtype)
        for name, x in _arrays(_call("model1", 0)).items()
    }
    call["kv_cache"] = jax.ShapeDtypeStruct((2**10, 2**15, 64, 1, 584), jnp.uint8)
    with pytest.raises(ValueError, match=r"vmap over 1024 pools of 2097152 entries .*lax\.map"):
        jax.eval_shape(jax.vmap(lambda call: sparse_mla_decode(**call)), call)
