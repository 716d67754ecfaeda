"""Every check: the message names the argument, what came and what was expected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import BeamDecodePlan, beam_decode_attn
from tests.beam_decode.calls import Shape, dense_call, jagged, paged
from tests.refusals import assert_refused, names_of

# B = 2, W = 3, Hq = 4, Hkv = 2, D = 8, Sk = 5, S_beam = 7, max_decode_nums = 6.
DENSE = dense_call(Shape())
JAGGED = jagged(DENSE)
PAGED = paged(DENSE, page_size=2)


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*shape):
    return np.zeros(shape, np.int32)


SHAPES = [
    (DENSE, "q", f32(2, 3, 4, 8), "got shape (2, 3, 4, 8), expected [B, 1, W, Hq, D]"),
    (DENSE, "q", f32(2, 2, 3, 4, 8), "got shape (2, 2, 3, 4, 8), expected [B, 1, W, Hq, D]"),
    (DENSE, "q", f32(2, 1, 3, 4, 12), "D: got 12 with the required divisor = 8, expected a"),
    (DENSE, "q", f32(2, 1, 3, 4, 0), "D: got 0 with the required divisor = 8, expected a"),
    (DENSE, "q", f32(2, 1, 3, 4, 264), "got head size D = 264, expected at most 256"),
    (DENSE, "q", f32(2, 1, 3, 3, 8), "Hq: got 3 with Hkv = 2, expected a positive multiple"),
    (DENSE, "q", f32(2, 1, 3, 0, 8), "Hq: got 0 with Hkv = 2, expected a positive multiple"),
    (DENSE, "k_context", f32(3, 5, 2, 8), "got shape (3, 5, 2, 8), expected [2, Sk, Hkv, 8]"),
    (DENSE, "k_context", f32(2, 5, 2, 16), "got shape (2, 5, 2, 16), expected [2, Sk, Hkv, 8]"),
    (DENSE, "k_context", f32(10, 2, 8), "got shape (10, 2, 8), expected [2, Sk, Hkv, 8]"),
    (DENSE, "v_context", f32(2, 4, 2, 8), "got shape (2, 4, 2, 8), expected [2, 5, 2, 8]"),
    (DENSE, "k_beam", f32(2, 7, 1, 8), "got shape (2, 7, 1, 8), expected [2, S_beam, 2, 8]"),
    (DENSE, "k_beam", f32(1, 7, 2, 8), "got shape (1, 7, 2, 8), expected [2, S_beam, 2, 8]"),
    (DENSE, "v_beam", f32(2, 6, 2, 8), "got shape (2, 6, 2, 8), expected [2, 7, 2, 8]"),
    (
        DENSE,
        "topk_indices",
        i32(2, 1, 4, 6, 2),
        "got shape (2, 1, 4, 6, 2), expected [2, 1, H, max_decode_nums, 3]",
    ),
    (
        DENSE,
        "topk_indices",
        i32(2, 1, 6, 3),
        "got shape (2, 1, 6, 3), expected [2, 1, H, max_decode_nums, 3]",
    ),
    (DENSE, "topk_indices", i32(2, 1, 3, 6, 3), "axis H: got 3, expected one of [1, 2, 4]"),
    (DENSE, "topk_indices", i32(2, 1, 0, 6, 3), "axis H: got 0, expected one of [1, 2, 4]"),
    (DENSE, "decode_nums", i32(1), "got shape (1,), expected [2]"),
    (DENSE, "decode_nums", i32(2, 1), "got shape (2, 1), expected [2]"),
    (DENSE, "seqused_k", i32(3), "got shape (3,), expected [2]"),
    (DENSE, "seqused_k", i32(), "got shape (), expected [2]"),
    (DENSE, "attn_sink", f32(2), "got shape (2,), expected [4]"),
    (DENSE, "attn_sink", f32(2, 4), "got shape (2, 4), expected [4]"),
    (DENSE, "softmax_scale", f32(2), "got shape (2,), expected []"),
    (JAGGED, "k_context", f32(2, 5, 2, 8), "got shape (2, 5, 2, 8), expected [total, Hkv, 8]"),
    (JAGGED, "cu_seqlens_k", i32(2), "got shape (2,), expected [3]"),
    (PAGED, "k_context", f32(12, 2, 8), "expected [num_pages, page_size, Hkv, 8]"),
    (PAGED, "block_tables", i32(3, 3), "got shape (3, 3), expected [2, max_pages]"),
    (PAGED, "block_tables", i32(6), "got shape (6,), expected [2, max_pages]"),
]

VALUES = [
    (DENSE, "softmax_scale", 0, "got 0, expected a number > 0"),
    (DENSE, "softmax_scale", -1.0, "got -1.0, expected a number > 0"),
    (DENSE, "softmax_scale", np.inf, "got inf, expected a number > 0"),
    (DENSE, "softmax_scale", np.float32(np.nan), "got nan, expected a number > 0"),
    (DENSE, "logits_soft_cap", 0.0, "got 0.0, expected a number > 0"),
    (DENSE, "logits_soft_cap", -50, "got -50, expected a number > 0"),
    # In float32 these are infinity, or flush the logits divided by them, or zero.
    (DENSE, "logits_soft_cap", 1e39, "got 1e+39, expected a number > 0, from 1e-38 to 1e+30"),
    (DENSE, "logits_soft_cap", 1e38, "got 1e+38, expected a number > 0, from 1e-38 to 1e+30"),
    (DENSE, "logits_soft_cap", 1e-46, "got 1e-46, expected a number > 0, from 1e-38 to 1e+30"),
    (DENSE, "implementation", "cuda", "got 'cuda', expected one of ['reference'"),
    (DENSE, "block_tables", i32(2, 3), "seqused_k: got None, expected int [B] with block_tables"),
    (JAGGED, "seqused_k", i32(2), "got an array beside cu_seqlens_k, expected None"),
    (JAGGED, "block_tables", i32(2, 3), "got an array beside cu_seqlens_k, expected None"),
]

FLOATS = "expected bfloat16, float16, float32"
TYPES = [
    (DENSE, "q", np.zeros((2, 1, 3, 4, 8)), f"got dtype float64, {FLOATS}"),
    (DENSE, "q", i32(2, 1, 3, 4, 8), f"got dtype int32, {FLOATS}"),
    (DENSE, "q", [[1.0]], "got list, expected an array"),
    (DENSE, "q", f32(2, 1, 3, 4, 8).astype(np.float16), "got dtype float32, expected float16"),
    *(
        (DENSE, name, DENSE[name].astype(jnp.bfloat16), "got dtype bfloat16, expected float32")
        for name in ("k_context", "v_context", "k_beam", "v_beam")
    ),
    *(
        (DENSE, name, None, "got NoneType, expected an array")
        for name in ("k_context", "v_context", "k_beam", "v_beam")
    ),
    (DENSE, "topk_indices", f32(2, 1, 1, 6, 3), "got dtype float32, expected int32 or int64"),
    (DENSE, "topk_indices", None, "got dtype object, expected int32 or int64"),
    (DENSE, "decode_nums", 2.0, "got dtype float64, expected int32 or int64"),
    (DENSE, "decode_nums", True, "got dtype bool, expected int32 or int64"),
    (DENSE, "seqused_k", f32(2), "got dtype float32, expected int32 or int64"),
    (DENSE, "attn_sink", i32(4), "got dtype int32, expected float32"),
    (DENSE, "attn_sink", "none", "got str, expected float32"),
    (DENSE, "softmax_scale", "auto", "got str, expected float32"),
    (DENSE, "softmax_scale", np.array(1), "got dtype int"),
    (DENSE, "softmax_scale", True, "got bool, expected a Python number"),
    (DENSE, "logits_soft_cap", f32(), "got ndarray, expected a Python number"),
    (DENSE, "logits_soft_cap", "30", "got str, expected a Python number"),
    (DENSE, "plan", {"num_splits": 2}, "got dict, expected BeamDecodePlan or None"),
    (JAGGED, "cu_seqlens_k", f32(3), "got dtype float32, expected int32 or int64"),
    (PAGED, "block_tables", f32(2, 3), "got dtype float32, expected int32 or int64"),
]


refused = functools.partial(assert_refused, beam_decode_attn, blamed=("k_context",))


@pytest.mark.parametrize("call, name, value, message", SHAPES, ids=names_of(SHAPES))
def test_shapes(call, name, value, message):
    refused(call, name, value, message, ValueError)


@pytest.mark.parametrize("call, name, value, message", VALUES, ids=names_of(VALUES))
def test_values(call, name, value, message):
    refused(call, name, value, message, ValueError)


@pytest.mark.parametrize("call, name, value, message", TYPES, ids=names_of(TYPES))
def test_types(call, name, value, message):
    refused(call, name, value, message, TypeError)


def test_traced_numbers_cannot_be_static_ones():
    function = jax.jit(lambda cap: beam_decode_attn(**DENSE, logits_soft_cap=cap))
    with pytest.raises(TypeError, match=r"logits_soft_cap: got .*Tracer, expected a Python number"):
        function(30.0)


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"pipeline": "2kernel"}, ValueError, "plan.pipeline: got '2kernel', expected one of"),
        ({"num_splits": 0}, ValueError, "plan.num_splits: got 0, expected >= 1"),
        ({"num_splits": -3}, ValueError, "plan.num_splits: got -3, expected >= 1"),
        ({"num_splits": 2.5}, TypeError, "plan.num_splits: got float, expected an integer"),
        ({"num_splits": "4"}, TypeError, "plan.num_splits: got str, expected an integer"),
        ({"num_splits": True}, TypeError, "plan.num_splits: got bool, expected an integer"),
        ({"num_stages": 0}, ValueError, "plan.num_stages: got 0, expected >= 1"),
        ({"block_m": 64.0}, TypeError, "plan.block_m: got float, expected an integer"),
        ({"block_n": 48}, ValueError, "plan.block_n: got 48, expected one of [None, 16, 32"),
        ({"num_warps": 3}, ValueError, "plan.num_warps: got 3, expected one of [None, 1, 2"),
    ],
)
def test_plan(fields, error, message):
    with pytest.raises(error) as caught:
        BeamDecodePlan(**fields)
    assert message in str(caught.value)


def test_plan_is_frozen_and_compared_by_value():
    plan = BeamDecodePlan("3kernel", 4)
    assert plan == BeamDecodePlan(pipeline="3kernel", num_splits=4)
    assert len({plan, BeamDecodePlan("3kernel", 4), BeamDecodePlan("fused", 4)}) == 2
    with pytest.raises(AttributeError):
        plan.num_splits = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_more_tokens_than_int32_counts():
    rows = jax.ShapeDtypeStruct((2**31, 1, 8), jnp.bfloat16)
    beam = jax.ShapeDtypeStruct((1, 0, 1, 8), jnp.bfloat16)
    q = jax.ShapeDtypeStruct((1, 1, 2, 1, 8), jnp.bfloat16)
    index = jax.ShapeDtypeStruct((1, 1, 1, 0, 2), jnp.int32)
    bounds = jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(ValueError, match=r"k_context: got room for 2147483648 tokens, expected"):
        jax.eval_shape(
            lambda *arrays: beam_decode_attn(*arrays[:-1], 0, cu_seqlens_k=arrays[-1]),
            *(q, rows, rows, beam, beam, index, bounds),
        )
