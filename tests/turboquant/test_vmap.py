"""vmap: which operands are mapped must not matter; the loop over single calls is the judge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turboquant.calls import (
    Shape,
    arrays_of,
    assert_same_as,
    check,
    function_of,
    make_call,
    run,
)

SIZE = 3
FORMS = {
    "mixed": Shape(spare=(1, 1)),
    "decode": Shape(queries=None),
    "fp8": Shape(queries=(2, 0, 3), key_bits=8, value_bits=3),
}
OPTIONAL = ("sinks", "softmax_scale")


def _call(form, seed):
    """A call with every optional operand; blocks and lengths reach beyond what is there."""
    rng = np.random.default_rng(seed)
    call = make_call(FORMS[form], seed)
    call["block_table"] = rng.integers(-2, 20, call["block_table"].shape, np.int32)
    call["seq_lens"] = rng.integers(-1, 14, 3, np.int32)
    if "query_start_loc" in call:
        inner = np.sort(rng.integers(0, 8, 4))
        call["query_start_loc"] = np.minimum(inner, len(call["query"])).astype(np.int32)
    call["sinks"] = rng.standard_normal(6).astype(np.float32)
    call["softmax_scale"] = np.array(rng.uniform(0.1, 0.4), np.float32)
    return {name: x for name, x in call.items() if x is not None} | (
        {"rotation": None, "centroids": None} if FORMS[form].key_bits == 8 else {}
    )


def _operands(form):
    return [name for name, x in arrays_of(_call(form, 0)).items() if x is not None]


def _looped(calls):
    """The judge, itself judged by the oracle."""
    results = [run(call) for call in calls]
    for call, result in zip(calls, results, strict=True):
        check(call, result)
    return tuple(np.stack(parts) for parts in zip(*results, strict=True))


def _function(call):
    constants = {name: None for name, x in call.items() if x is None}
    return lambda operands: function_of(call)(**operands, **constants)


def _check_mapped(form, mapped, seed=0):
    """Maps some operands of SIZE calls and shares the others, which are those of the first."""
    calls = [_call(form, seed + n) for n in range(SIZE)]
    calls = [{x: call[x] if x in mapped else calls[0][x] for x in call} for call in calls]
    operands = {
        name: np.stack([call[name] for call in calls]) if name in mapped else calls[0][name]
        for name in _operands(form)
    }
    axes = {name: 0 if name in mapped else None for name in operands}
    result = jax.jit(jax.vmap(_function(calls[0]), in_axes=(axes,)))(operands)
    assert_same_as(result, _looped(calls))


@pytest.mark.parametrize("form", FORMS)
def test_all_operands(form):
    _check_mapped(form, set(_operands(form)))


@pytest.mark.parametrize("name", _operands("mixed"))
def test_one_operand(name):
    _check_mapped("mixed", {name})


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(st.sampled_from(sorted(FORMS)), st.data())
def test_any_operands(form, data):
    mapped = st.sets(st.sampled_from(_operands(form)), min_size=2)
    _check_mapped(form, data.draw(mapped), seed=10)


@pytest.mark.parametrize("form", FORMS)
def test_optional_operands_absent(form):
    calls = [_call(form, seed) for seed in range(SIZE)]
    calls = [{name: x for name, x in call.items() if name not in OPTIONAL} for call in calls]
    names = [name for name in _operands(form) if name not in OPTIONAL]
    stacked = {name: np.stack([call[name] for call in calls]) for name in names}
    assert_same_as(jax.jit(jax.vmap(_function(calls[0])))(stacked), _looped(calls))


def test_mapped_axes_elsewhere():
    calls = [_call("mixed", seed) for seed in range(SIZE)]
    stacked = {name: np.stack([call[name] for call in calls]) for name in _operands("mixed")}
    axes = {name: x.ndim - 1 for name, x in stacked.items()}
    operands = {name: np.moveaxis(x, 0, axes[name]) for name, x in stacked.items()}
    result = jax.jit(jax.vmap(_function(calls[0]), in_axes=(axes,)))(operands)
    assert_same_as(result, _looped(calls))


@pytest.mark.parametrize(
    "inner, outer",
    [
        ({"query", "rotation", "query_start_loc"}, {"kv_cache", "centroids", "seq_lens"}),
        ({"kv_cache", "centroids"}, {"kv_cache", "rotation", "sinks", "softmax_scale"}),
        ({"sinks", "block_table"}, {"query", "query_start_loc"}),
    ],
)
def test_nested(inner, outer):
    """Two axes, each mapping some operands: [outer 2, inner SIZE, ...]."""

    def pick(o, i):
        """The call at (o, i): operands vary only along the axes that map them."""
        names = _call("mixed", 0)
        return {n: _call("mixed", 10 * o * (n in outer) + i * (n in inner))[n] for n in names}

    calls = [[pick(o, i) for i in range(SIZE)] for o in range(2)]
    operands = {}
    for name in _operands("mixed"):
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


def test_a_shared_cache_is_not_copied():
    """Up to the primitive, which is where kernels begin: the reference does make copies."""
    call = _call("mixed", 0)
    mapped = {name: 0 if name in ("query", "sinks") else None for name in _operands("mixed")}
    abstract = {
        name: jax.ShapeDtypeStruct(((64,) if mapped[name] == 0 else ()) + x.shape, x.dtype)
        for name, x in arrays_of(call).items()
    }
    jaxpr = jax.make_jaxpr(jax.vmap(_function(call), in_axes=(mapped,)))(abstract).jaxpr
    assert "turboquant_attention" in {equation.primitive.name for equation in jaxpr.eqns}
    bytes_made = [v.aval.size for e in jaxpr.eqns for v in e.outvars if v.aval.dtype == jnp.uint8]
    assert max(bytes_made, default=0) <= call["kv_cache"].size


@pytest.mark.parametrize("form", FORMS)
def test_over_nothing(form):
    call = _call(form, 0)
    empty = {name: np.stack([call[name]])[:0] for name in _operands(form)}
    out, lse = jax.jit(jax.vmap(_function(call)))(empty)
    tokens = len(call["query"])
    assert (out.shape, lse.shape) == ((0, tokens, 6, 16), (0, tokens, 6))


def test_caches_past_32_bits_are_refused():
    """Mapped caches are laid end to end; their blocks must have 32-bit numbers."""
    call = _call("mixed", 0)
    abstract = {
        name: jax.ShapeDtypeStruct((2**16, *x.shape), x.dtype)
        for name, x in arrays_of(call).items()
    }
    shape = call["format"].cache_shape(2**16)
    abstract["kv_cache"] = jax.ShapeDtypeStruct((2**16, *shape), jnp.uint8)
    with pytest.raises(ValueError, match=r"vmap over 65536 pools of 65536 entries .*lax\.map"):
        jax.eval_shape(jax.vmap(_function(call)), abstract)
