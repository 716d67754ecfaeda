"""vmap: which operands are mapped must not matter; the loop over single calls is the judge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.calls import Shape, assert_same_as, check, dense_call, jagged, paged, run
from tests.tolerances import REORDERED

SIZE = 3
SHAPE = Shape(batch=2, width=2, heads=4, kv_heads=2, context=5, beam_rows=4, steps=3)
FORMS = {
    "dense": lambda call: call,
    "jagged": functools.partial(jagged, filler=1.5),
    "paged": functools.partial(paged, page_size=2, filler=1.5),
}
OPERANDS = ("q", "k_context", "v_context", "k_beam", "v_beam", "topk_indices", "decode_nums")
OPTIONAL = ("attn_sink", "softmax_scale")
INDEX = {"dense": ("seqused_k",), "jagged": ("cu_seqlens_k",)}
INDEX["paged"] = ("seqused_k", "block_tables")


def _call(form, seed):
    """A ragged call with every optional operand; indices reach beyond their caches."""
    rng = np.random.default_rng(seed)
    call = dense_call(SHAPE, seed=seed)
    call["seqused_k"] = rng.integers(0, 6, 2, np.int32)
    call["topk_indices"] = rng.integers(-2, 7, call["topk_indices"].shape, np.int32)
    call["decode_nums"] = rng.integers(1, 4, 2, np.int32)
    call["attn_sink"] = rng.standard_normal(4).astype(np.float32)
    call["softmax_scale"] = np.array(rng.uniform(0.2, 1), np.float32)
    return FORMS[form](call)


def _stacked(calls):
    return {name: np.stack([call[name] for call in calls]) for name in calls[0]}


def _looped(calls):
    """The judge, itself judged by the oracle."""
    results = [run(call) for call in calls]
    for call, result in zip(calls, results, strict=True):
        check(call, result)
    return tuple(np.stack(parts) for parts in zip(*results, strict=True))


def _vmapped(call, axes):
    """Calls the operator under vmap, with an axis or None for each operand."""

    def function(call):
        return beam_decode_attn(return_lse=True, **call)

    return jax.jit(jax.vmap(function, in_axes=(axes,)))(call)


def _check_mapped(form, mapped, seed=0):
    """Maps some operands of SIZE calls and shares the others, which are those of the first."""
    calls = [_call(form, seed + n) for n in range(SIZE)]
    calls = [{x: call[x] if x in mapped else calls[0][x] for x in call} for call in calls]
    stacked = _stacked(calls)
    operands = {name: x if name in mapped else calls[0][name] for name, x in stacked.items()}
    axes = {name: 0 if name in mapped else None for name in operands}
    assert_same_as(_vmapped(operands, axes), _looped(calls), REORDERED)


@pytest.mark.parametrize("form", FORMS)
def test_all_operands(form):
    _check_mapped(form, {*OPERANDS, *INDEX[form], *OPTIONAL})


@pytest.mark.parametrize("name", [*OPERANDS, *OPTIONAL, "seqused_k"])
def test_one_operand_of_a_dense_call(name):
    _check_mapped("dense", {name})


# The other operands take no part in what sets these forms apart.
@pytest.mark.parametrize("name", ["q", *OPERANDS[1:3], "cu_seqlens_k"])
def test_one_operand_of_a_jagged_call(name):
    _check_mapped("jagged", {name})


@pytest.mark.parametrize("name", ["q", *OPERANDS[1:3], "block_tables", "seqused_k"])
def test_one_operand_of_a_paged_call(name):
    _check_mapped("paged", {name})


@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(st.sampled_from(sorted(FORMS)), st.data())
def test_any_operands(form, data):
    names = sorted({*OPERANDS, *INDEX[form], *OPTIONAL})
    _check_mapped(form, data.draw(st.sets(st.sampled_from(names), min_size=1)), seed=10)


@pytest.mark.parametrize("form", FORMS)
def test_optional_operands_absent(form):
    calls = [_call(form, seed) for seed in range(SIZE)]
    absent = {"dense": (*OPTIONAL, "seqused_k")}.get(form, OPTIONAL)
    calls = [{name: x for name, x in call.items() if name not in absent} for call in calls]
    assert_same_as(_vmapped(_stacked(calls), 0), _looped(calls), REORDERED)


def test_decode_nums_for_all_samples():
    calls = [_call("dense", seed) | {"decode_nums": np.int32(seed)} for seed in range(SIZE)]
    assert_same_as(_vmapped(_stacked(calls), 0), _looped(calls), REORDERED)


def test_mapped_axes_elsewhere():
    calls = [_call("paged", seed) for seed in range(SIZE)]
    stacked = _stacked(calls)
    axes = {name: x.ndim - 1 for name, x in stacked.items()} | {"k_context": 2, "decode_nums": 0}
    operands = {name: np.moveaxis(x, 0, axes[name]) for name, x in stacked.items()}
    assert_same_as(_vmapped(operands, axes), _looped(calls), REORDERED)


@pytest.mark.parametrize(
    "form, inner, outer",
    [
        ("dense", {"q", "topk_indices"}, {"k_context", "v_context", "seqused_k"}),
        ("dense", {"k_context", "v_context"}, {"q", "attn_sink", "softmax_scale"}),
        ("jagged", {"q", "cu_seqlens_k"}, {"k_context", "v_context", "decode_nums"}),
        ("jagged", {"k_context", "v_context"}, {"q", "cu_seqlens_k"}),
        ("paged", {"q", "k_beam"}, {"k_context", "v_context", "block_tables"}),
        ("paged", {"k_context", "v_context"}, {"k_context", "v_context", "seqused_k"}),
    ],
)
def test_nested(form, inner, outer):
    """Two axes, each mapping some operands: [outer 2, inner SIZE, ...]."""

    def pick(o, i):
        """The call at (o, i): operands vary only along the axes that map them."""
        return {
            name: _call(form, 10 * (o if name in outer else 0) + (i if name in inner else 0))[name]
            for name in _call(form, 0)
        }

    calls = [[pick(o, i) for i in range(SIZE)] for o in range(2)]
    operands = {}
    for name in calls[0][0]:
        x = np.stack([np.stack([call[name] for call in row]) for row in calls])
        x = x if name in inner else x[:, 0]
        operands[name] = x if name in outer else x[0]
    inner_axes, outer_axes = (
        {name: 0 if name in mapped else None for name in operands} for mapped in (inner, outer)
    )

    def function(call):
        return beam_decode_attn(return_lse=True, **call)

    mapped = jax.vmap(jax.vmap(function, in_axes=(inner_axes,)), in_axes=(outer_axes,))
    want = tuple(np.stack(parts) for parts in zip(*map(_looped, calls), strict=True))
    assert_same_as(jax.jit(mapped)(operands), want, REORDERED)


@pytest.mark.parametrize(
    "form, index",
    [
        ("paged", {"block_tables": [[-1, 8, 0], [9, 1, 2**31 - 1]], "seqused_k": [5, 6]}),
        ("jagged", {"cu_seqlens_k": [-3, 9, 99]}),
    ],
)
def test_bad_indices_do_not_reach_a_neighbour(form, index):
    """Pages, bounds and rows just past the end of one call's caches lie in the next call's."""
    index = {name: np.array(x, np.int32) for name, x in index.items()}
    calls = [_call(form, seed) | index for seed in range(SIZE)]
    for call in calls:
        call["topk_indices"][..., 0] = -1
        call["topk_indices"][..., 1] = SHAPE.beam_rows
    assert_same_as(_vmapped(_stacked(calls), 0), _looped(calls), REORDERED)


def _largest_array(jaxpr):
    return max(v.aval.size for equation in jaxpr.eqns for v in equation.outvars)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mapped", [("q",), ("topk_indices", "attn_sink")])
def test_a_shared_context_is_not_copied(form, mapped):
    """Up to the primitive, which is where kernels begin: the reference does make copies."""
    size = 4096
    shape = Shape(batch=2, width=2, context=256, beam_rows=4, steps=1)
    call = FORMS[form](dense_call(shape, seqused_k=np.array([256, 100], np.int32)))
    call |= {"attn_sink": np.zeros(4, np.float32)}
    abstract = {
        name: jax.ShapeDtypeStruct((size, *x.shape) if name in mapped else x.shape, x.dtype)
        for name, x in call.items()
    }
    axes = {name: 0 if name in mapped else None for name in call}
    vmapped = jax.vmap(lambda call: beam_decode_attn(**call), in_axes=(axes,))
    jaxpr = jax.make_jaxpr(vmapped)(abstract).jaxpr
    assert "beam_decode_attn" in {equation.primitive.name for equation in jaxpr.eqns}
    assert _largest_array(jaxpr) < size * call["k_context"].size / 8


def test_over_nothing():
    for form in FORMS:
        calls = _stacked([_call(form, 0)])
        out, lse = _vmapped({name: x[:0] for name, x in calls.items()}, 0)
        assert out.shape == (0, 2, 1, 2, 4, 8)
        assert lse.shape == (0, 2, 1, 2, 4)


def test_pools_past_32_bits_are_refused():
    """Mapped pools are laid end to end; their pages must have 32-bit numbers."""
    call = {
        name: jax.ShapeDtypeStruct((2**20, *x.shape), x.dtype)
        for name, x in _call("paged", 0).items()
    }
    for name in ("k_context", "v_context"):
        call[name] = jax.ShapeDtypeStruct((2**20, 2**11, *call[name].shape[2:]), jnp.float32)
    with pytest.raises(ValueError, match=r"vmap over 1048576 pools of 2048 entries .*lax\.map"):
        jax.eval_shape(jax.vmap(lambda call: beam_decode_attn(**call)), call)
