"""Every check: the message names the argument, what came and what was expected."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import (
    SparseMlaPlan,
    append_mla_cache,
    mla_schedule,
    pack_mla_cache,
    sparse_mla_decode,
    unpack_mla_cache,
)
from tests.refusals import assert_refused, names_of
from tests.sparse_mla.calls import Shape, make_call
from tests.sparse_mla.oracle import BF16

# B = 2, Sq = 3, Hq = 4, topk = 7, 4 blocks of 3 tokens; extra: 4 of 2 blocks of 5.
V32 = make_call(Shape(extra_topk=4))
PADDED = make_call(Shape(format="model1", padded=True, extra_topk=4))
BF16_CALL = make_call(Shape(format="bf16"))
ALONE = make_call(Shape())


def u8(*shape):
    return np.zeros(shape, np.uint8)


def i32(*shape):
    return np.zeros(shape, np.int32)


def f32(*shape):
    return np.zeros(shape, np.float32)


def bf16(*shape):
    return np.zeros(shape, BF16)


VALUES = [
    (V32, "q", bf16(2, 3, 576), "got shape (2, 3, 576), expected [B, Sq, Hq, Dqk]"),
    (V32, "q", bf16(2, 3, 4, 640), "q's head size Dqk: got 640, expected one of [576, 512]"),
    (V32, "q", bf16(2, 3, 0, 576), "got Hq = 0, expected 1 to 128 heads"),
    (V32, "q", bf16(2, 3, 129, 576), "got Hq = 129, expected 1 to 128 heads"),
    (V32, "kv_cache", u8(4, 3, 1, 584), "got shape (4, 3, 1, 584), expected [num_blocks, page_"),
    (V32, "kv_cache", u8(4, 3, 2, 656), "expected [num_blocks, page_size, 1, 656]"),
    (V32, "kv_cache", u8(4, 3, 656), "expected [num_blocks, page_size, 1, 656]"),
    (V32, "kv_cache", u8(4, 1968), "page_size: got None, expected an int: kv_cache has padded"),
    (V32, "extra_kv_cache", u8(4, 3280), "page_size: got None, expected an int: extra_kv_cache"),
    (V32, "page_size", 4, "page_size: got 4, expected 3, as in kv_cache"),
    (V32, "extra_page_size", 4, "page_size: got 4, expected 5, as in extra_kv_cache"),
    (V32, "indices", i32(2, 7), "got shape (2, 7), expected [2, 3, topk]"),
    (V32, "indices", i32(2, 1, 7), "got shape (2, 1, 7), expected [2, 3, topk]"),
    (V32, "extra_indices", i32(3, 3, 4), "got shape (3, 3, 4), expected [2, 3, topk]"),
    (V32, "topk_length", i32(3), "got shape (3,), expected [2]"),
    (V32, "topk_length", i32(), "got shape (), expected [2, 3]"),
    (V32, "topk_length", i32(2, 3, 1), "got shape (2, 3, 1), expected [2, 3]"),
    (V32, "extra_topk_length", i32(2, 2), "got shape (2, 2), expected [2, 3]"),
    (V32, "attn_sink", f32(3), "got shape (3,), expected [4]"),
    (V32, "attn_sink", f32(2, 4), "got shape (2, 4), expected [4]"),
    (V32, "softmax_scale", 0, "got 0, expected a number > 0"),
    (V32, "softmax_scale", -1.0, "got -1.0, expected a number > 0"),
    (V32, "softmax_scale", np.inf, "got inf, expected a number > 0"),
    (V32, "softmax_scale", f32(2), "got shape (2,), expected []"),
    (V32, "implementation", "cuda", "got 'cuda', expected one of ['reference'"),
    (V32, "extra_indices", None, "extra_indices: got None, expected an array with extra_kv_cache"),
    (ALONE, "extra_indices", i32(2, 3, 1), "got a value without extra_kv_cache, expected None"),
    (ALONE, "extra_topk_length", i32(2), "got a value without extra_kv_cache, expected None"),
    (ALONE, "extra_page_size", 3, "got a value without extra_kv_cache, expected None"),
    (BF16_CALL, "kv_cache", bf16(4, 3, 1, 512), "got Dqk = 512, expected q's 576"),
    (BF16_CALL, "kv_cache", bf16(4, 3, 1, 600), "got 600, expected one of [576, 512]"),
    (BF16_CALL, "kv_cache", bf16(4, 1728), "expected [num_blocks, page_size, 1, Dqk]"),
    (BF16_CALL, "page_size", 7, "page_size: got 7, expected 3, as in kv_cache"),
    (PADDED, "page_size", 0, "page_size: got 0, expected >= 1"),
    (PADDED, "page_size", 4, "block_bytes: got 1768, expected a multiple of 8, at least 2336"),
    (PADDED, "kv_cache", u8(4, 1764), "block_bytes: got 1764, expected a multiple of 8, at least"),
    (PADDED, "extra_kv_cache", u8(2, 2912), "block_bytes: got 2912, expected a multiple of 8"),
]
TYPES = [
    (V32, "q", f32(2, 3, 4, 576), "got dtype float32, expected bfloat16"),
    (V32, "q", [[1.0]], "got list, expected an array"),
    (V32, "kv_cache", None, "kv_cache: got NoneType, expected an array"),
    (V32, "kv_cache", [[1]], "kv_cache: got list, expected an array"),
    (V32, "kv_cache", f32(4, 3, 1, 656), "got dtype float32, expected uint8, int8, float8_e4m3fn"),
    (V32, "extra_kv_cache", bf16(2, 5, 1, 576), "got dtype bfloat16, expected uint8, int8, float8"),
    (V32, "indices", f32(2, 3, 7), "got dtype float32, expected int32 or int64"),
    (V32, "indices", None, "got dtype object, expected int32 or int64"),
    (V32, "topk_length", f32(2), "got dtype float32, expected int32 or int64"),
    (V32, "attn_sink", i32(4), "got dtype int32, expected float32"),
    (V32, "attn_sink", "none", "got str, expected float32"),
    (V32, "softmax_scale", "auto", "got str, expected float32"),
    (V32, "softmax_scale", True, "got bool, expected a Python number"),
    (V32, "schedule", i32(3, 2), "got ndarray, expected MlaSchedule or None"),
    (V32, "plan", {"num_splits": 2}, "got dict, expected SparseMlaPlan or None"),
    (BF16_CALL, "kv_cache", np.zeros((4, 3, 1, 576), np.float16), "got dtype float16, expected"),
    (PADDED, "page_size", 3.0, "page_size: got float, expected an integer"),
]


refused = functools.partial(assert_refused, sparse_mla_decode, blamed=("page_size", "block_bytes"))


@pytest.mark.parametrize("call, name, value, message", VALUES, ids=names_of(VALUES))
def test_values(call, name, value, message):
    refused(call, name, value, message, ValueError)


@pytest.mark.parametrize("call, name, value, message", TYPES, ids=names_of(TYPES))
def test_types(call, name, value, message):
    refused(call, name, value, message, TypeError)


SIZES = {"batch": 2, "seqlen_q": 3, "num_heads": 4, "topk": 7, "extra_topk": 4}


@pytest.mark.parametrize("name, size", [(name, size + 1) for name, size in SIZES.items()])
@pytest.mark.parametrize("jit", [False, True])
def test_a_schedule_for_another_shape(name, size, jit):
    function = jax.jit(sparse_mla_decode) if jit else sparse_mla_decode
    with pytest.raises(ValueError, match=rf"schedule: got one made for .*{name}={size}.*expected"):
        function(**V32, schedule=mla_schedule(**SIZES | {name: size}))


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"num_splits": 0}, ValueError, "plan.num_splits: got 0, expected >= 1"),
        ({"num_splits": 2.5}, TypeError, "plan.num_splits: got float, expected an integer"),
        ({"num_splits": True}, TypeError, "plan.num_splits: got bool, expected an integer"),
        ({"block_h": 128}, ValueError, "plan.block_h: got 128, expected one of [None, 16, 32, 64]"),
        ({"block_n": 128}, ValueError, "plan.block_n: got 128, expected one of [None, 16, 32, 64]"),
        ({"num_warps": 3}, ValueError, "plan.num_warps: got 3, expected one of [None, 4, 8, 16]"),
        ({"width": 64}, ValueError, "plan.width: got 64, expected one of [None, 128, 256, 512]"),
        ({"num_stages": 0}, ValueError, "plan.num_stages: got 0, expected >= 1"),
        ({"blocks_per_sm": "2"}, TypeError, "plan.blocks_per_sm: got str, expected an integer"),
    ],
)
def test_plan(fields, error, message):
    with pytest.raises(error) as caught:
        SparseMlaPlan(**fields)
    assert message in str(caught.value)


def test_plan_is_frozen_and_compared_by_value():
    assert len({SparseMlaPlan(2), SparseMlaPlan(num_splits=2), SparseMlaPlan()}) == 2
    with pytest.raises(AttributeError):
        SparseMlaPlan().num_splits = 2  # pyright: ignore[reportAttributeAccessIssue]


KEYS = f32(2, 3, 1, 576)
KEY = f32(1, 576)
SLOT = i32(1)
CACHE = u8(2, 3, 1, 656)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: pack_mla_cache(KEYS, "v33"), ValueError, "format: got 'v33', expected one of"),
        (lambda: pack_mla_cache(KEYS, "bf16"), ValueError, "format: got 'bf16', expected one of"),
        (lambda: pack_mla_cache(KEYS, "model1"), ValueError, "kv: got shape (2, 3, 1, 576), exp"),
        (lambda: pack_mla_cache(KEYS[0], "v32"), ValueError, "kv: got shape (3, 1, 576), expected"),
        (lambda: pack_mla_cache(None, "v32"), TypeError, "kv: got NoneType, expected an array"),
        (lambda: pack_mla_cache(i32(2, 3, 1, 576), "v32"), TypeError, "kv: got dtype int32"),
        (lambda: pack_mla_cache(KEYS, "v32", 1967), ValueError, "block_bytes: got 1967, expected"),
        (lambda: pack_mla_cache(KEYS, "v32", 1952), ValueError, "at least 1968 (3 tokens of v32)"),
        (lambda: pack_mla_cache(KEYS, "v32", 1976), ValueError, "a multiple of 16"),
        (lambda: pack_mla_cache(KEYS, "v32", 2000.0), TypeError, "block_bytes: got float"),
        (lambda: unpack_mla_cache(CACHE, "fp8"), ValueError, "format: got 'fp8', expected one of"),
        (lambda: unpack_mla_cache(CACHE, "model1"), ValueError, "cache: got shape (2, 3, 1, 656)"),
        (lambda: unpack_mla_cache(CACHE, "v32", 2), ValueError, "page_size: got 2, expected 3"),
        (lambda: unpack_mla_cache(u8(2, 1968), "v32"), ValueError, "page_size: got None, expected"),
        (lambda: unpack_mla_cache(KEYS, "v32"), TypeError, "cache: got dtype float32, expected u"),
        (lambda: append_mla_cache(CACHE, KEY, SLOT, "v"), ValueError, "format: got 'v', expected"),
        (
            lambda: append_mla_cache(CACHE, KEY[:, :512], SLOT, "v32"),
            ValueError,
            "kv: got shape (1, 512), expected [N, 576]",
        ),
        (
            lambda: append_mla_cache(CACHE, KEY[0], SLOT, "v32"),
            ValueError,
            "kv: got shape (576,), expected [N, 576]",
        ),
        (
            lambda: append_mla_cache(CACHE, KEY, i32(2), "v32"),
            ValueError,
            "slot_mapping: got shape (2,), expected [1]",
        ),
        (
            lambda: append_mla_cache(CACHE, KEY, f32(1), "v32"),
            TypeError,
            "slot_mapping: got dtype float32, expected int32 or int64",
        ),
        (
            lambda: append_mla_cache(CACHE, KEY.astype(np.float16), SLOT, "v32"),
            TypeError,
            "kv: got dtype float16, expected float32, bfloat16",
        ),
        (
            lambda: append_mla_cache(CACHE, KEY, SLOT, "bf16"),
            TypeError,
            "cache: got dtype uint8, expected bfloat16",
        ),
        (
            lambda: append_mla_cache(bf16(2, 3, 1, 576), KEY, SLOT, "bf16", 4),
            ValueError,
            "page_size: got 4, expected 3, as in cache",
        ),
        (
            lambda: append_mla_cache(u8(2, 1968), KEY, SLOT, "v32"),
            ValueError,
            "page_size: got None, expected an int: cache has padded blocks",
        ),
        (lambda: append_mla_cache(None, KEY, SLOT, "v32"), TypeError, "cache: got NoneType"),
    ],
)
def test_cache_functions(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("shape, page_size", [((2**26, 64, 1, 656), None), ((2**26, 64 * 656), 64)])
def test_more_slots_than_32_bits_can_number(shape, page_size):
    cache = jax.ShapeDtypeStruct(shape, jnp.uint8)
    message = r"cache: got 67108864 blocks of 64 tokens, expected less than 2\*\*31 slots"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda cache: append_mla_cache(cache, KEY, SLOT, "v32", page_size), cache)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda cache: sparse_mla_decode(V32["q"], cache, V32["indices"], page_size=page_size),
            cache,
        )


def test_traced_numbers_cannot_be_static_ones():
    function = jax.jit(lambda cache, page: unpack_mla_cache(cache, "v32", page))
    with pytest.raises(TypeError, match=r"page_size: got .*Tracer, expected an integer"):
        function(jnp.zeros((2, 1968), jnp.uint8), 3)
