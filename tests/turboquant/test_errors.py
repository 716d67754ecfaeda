"""Every check: the message names the argument, what came and what was expected."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jax_beam_attn import (
    TurboQuantFormat,
    TurboQuantPlan,
    turboquant_attention,
    turboquant_decode_attention,
    turboquant_dequantize,
    turboquant_store,
)
from tests.refusals import assert_refused, names_of
from tests.turboquant.calls import Shape, codebook, make_call

# S = 3, 7 tokens, Hq = 6, Hkv = 2, D = 16, 17 blocks of 3 tokens of 22 bytes, at most 4 each.
MIXED = make_call(Shape())
DECODE = make_call(Shape(queries=None))
FP8 = make_call(Shape(key_bits=8))
FORMAT = Shape().format


def f32(*shape):
    return np.zeros(shape, np.float32)


def i32(*shape):
    return np.zeros(shape, np.int32)


def u8(*shape):
    return np.zeros(shape, np.uint8)


VALUES = [
    (MIXED, "query", f32(7, 96), "got shape (7, 96), expected [num_tokens, Hq, 16]"),
    (MIXED, "query", f32(7, 6, 24), "got shape (7, 6, 24), expected [num_tokens, Hq, 16]"),
    (DECODE, "query", f32(3, 96), "got shape (3, 96), expected [B, Hq, 16]"),
    (DECODE, "query", f32(4, 6, 16), "got shape (3, 4), expected [4, max_blocks]"),
    (MIXED, "query", f32(7, 5, 16), "query's heads Hq: got 5 with format.num_kv_heads = 2"),
    (MIXED, "query", f32(7, 0, 16), "query's heads Hq: got 0 with format.num_kv_heads = 2"),
    (MIXED, "kv_cache", u8(17, 3, 2, 20), "expected [num_blocks, 3, 2, 22]"),
    (MIXED, "kv_cache", u8(17, 132), "got shape (17, 132), expected [num_blocks, 3, 2, 22]"),
    (MIXED, "block_table", i32(4, 4), "got shape (4, 4), expected [3, max_blocks]"),
    (MIXED, "block_table", i32(12), "got shape (12,), expected [3, max_blocks]"),
    (MIXED, "seq_lens", i32(2), "got shape (2,), expected [3]"),
    (MIXED, "query_start_loc", i32(2, 2), "got shape (2, 2), expected [S + 1]"),
    (MIXED, "query_start_loc", i32(0), "got shape (0,), expected [S + 1]"),
    (MIXED, "query_start_loc", i32(3), "got shape (3, 4), expected [2, max_blocks]"),
    (MIXED, "rotation", f32(16), "got shape (16,), expected [16, 16]"),
    (MIXED, "rotation", f32(8, 8), "got shape (8, 8), expected [16, 16]"),
    (MIXED, "rotation", None, "rotation: got None, expected an array with key_bits < 8"),
    (MIXED, "centroids", f32(8), "got shape (8,), expected [16]"),
    (MIXED, "centroids", None, "centroids: got None, expected an array with key_bits < 8"),
    (MIXED, "sinks", f32(2), "got shape (2,), expected [6]"),
    (MIXED, "sinks", f32(3, 6), "got shape (3, 6), expected [6]"),
    (MIXED, "softmax_scale", 0, "got 0, expected a number > 0"),
    (MIXED, "softmax_scale", -1.0, "got -1.0, expected a number > 0"),
    (MIXED, "softmax_scale", f32(3), "got shape (3,), expected []"),
    (MIXED, "sliding_window", 0, "sliding_window: got 0, expected >= 1"),
    (MIXED, "sliding_window", -1, "sliding_window: got -1, expected >= 1"),
    (MIXED, "logits_soft_cap", 0.0, "got 0.0, expected a number > 0"),
    (MIXED, "max_query_len", -1, "max_query_len: got -1, expected >= 0"),
    (MIXED, "max_seq_len", -1, "max_seq_len: got -1, expected >= 0"),
    (MIXED, "implementation", "cuda", "got 'cuda', expected one of ['reference'"),
    (FP8, "kv_cache", u8(17, 3, 2, 22), "expected [num_blocks, 3, 2, 28]"),
]
TYPES = [
    (MIXED, "query", i32(7, 6, 16), "got dtype int32, expected bfloat16, float16, float32"),
    (MIXED, "query", None, "query: got NoneType, expected an array"),
    (MIXED, "kv_cache", f32(17, 3, 2, 22), "got dtype float32, expected uint8"),
    (MIXED, "kv_cache", None, "kv_cache: got NoneType, expected an array"),
    (MIXED, "block_table", f32(3, 4), "got dtype float32, expected int32 or int64"),
    (MIXED, "seq_lens", f32(3), "got dtype float32, expected int32 or int64"),
    (MIXED, "query_start_loc", f32(4), "got dtype float32, expected int32 or int64"),
    (MIXED, "rotation", i32(16, 16), "got dtype int32, expected float32"),
    (MIXED, "centroids", "lloyd", "centroids: got str, expected float32"),
    (MIXED, "sinks", i32(6), "got dtype int32, expected float32"),
    (MIXED, "softmax_scale", "auto", "got str, expected float32"),
    (MIXED, "sliding_window", 2.0, "sliding_window: got float, expected an integer"),
    (MIXED, "logits_soft_cap", "none", "got str, expected a Python number"),
    (MIXED, "max_query_len", 2.0, "max_query_len: got float, expected an integer"),
    (MIXED, "max_seq_len", f32(), "max_seq_len: got ndarray, expected an integer"),
    (MIXED, "format", "4bit_nc", "format: got str, expected TurboQuantFormat"),
    (MIXED, "plan", {"num_splits": 2}, "got dict, expected TurboQuantPlan or None"),
]


def refused(call, name, value, message, error):
    function = turboquant_attention if "query_start_loc" in call else turboquant_decode_attention
    assert_refused(function, call, name, value, message, error, blamed=("block_table",))


@pytest.mark.parametrize("call, name, value, message", VALUES, ids=names_of(VALUES))
def test_values(call, name, value, message):
    refused(call, name, value, message, ValueError)


@pytest.mark.parametrize("call, name, value, message", TYPES, ids=names_of(TYPES))
def test_types(call, name, value, message):
    refused(call, name, value, message, TypeError)


FIELDS = {"head_dim": 64, "num_kv_heads": 2, "block_size": 16}
FIELDS |= {"key_bits": 4, "value_bits": 4, "norm_correction": True}


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        ("head_dim", 0, ValueError, "head_dim: got 0, expected >= 1"),
        ("head_dim", 60, ValueError, "head_dim: got 60 with the required divisor = 8"),
        ("head_dim", 264, ValueError, "head_dim: got 264, expected at most 256"),
        ("head_dim", 64.0, TypeError, "head_dim: got float, expected an integer"),
        ("num_kv_heads", 0, ValueError, "num_kv_heads: got 0, expected >= 1"),
        ("block_size", 0, ValueError, "block_size: got 0, expected >= 1"),
        ("block_size", True, TypeError, "block_size: got bool, expected an integer"),
        ("key_bits", 2, ValueError, "key_bits: got 2, expected one of [3, 4, 8]"),
        ("value_bits", 8, ValueError, "value_bits: got 8, expected one of [3, 4]"),
        ("norm_correction", None, ValueError, "norm_correction: got None, expected one of"),
        ("layout", "aos", ValueError, "layout: got 'aos', expected one of ['soa']"),
    ],
)
def test_formats(name, value, error, message):
    with pytest.raises(error) as caught:
        TurboQuantFormat(**FIELDS | {name: value})
    assert message in str(caught.value)


def test_presets():
    with pytest.raises(ValueError, match=r"name: got '2bit', expected one of \['k8v4', '4bit_nc'"):
        TurboQuantFormat.preset("2bit", head_dim=64, num_kv_heads=2, block_size=16)


def test_formats_are_frozen_and_compared_by_value():
    one, same = TurboQuantFormat(**FIELDS), TurboQuantFormat(**FIELDS)
    assert one == same and hash(one) == hash(same)
    assert one != dataclasses.replace(one, norm_correction=False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.key_bits = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert jax.jit(lambda format: format.key_bits, static_argnums=0)(one) == 4


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"num_splits": 0}, ValueError, "plan.num_splits: got 0, expected >= 1"),
        ({"num_splits": 2.5}, TypeError, "plan.num_splits: got float, expected an integer"),
        ({"block_m": 4}, ValueError, "plan.block_m: got 4, expected one of [None, 8"),
        ({"block_n": 48}, ValueError, "plan.block_n: got 48, expected one of [None, 16"),
        ({"num_warps": 3}, ValueError, "plan.num_warps: got 3, expected one of [None, 1"),
        ({"swapped": 2}, ValueError, "plan.swapped: got 2, expected one of [None, False, True]"),
        ({"rotation": "none"}, ValueError, "plan.rotation: got 'none', expected one of"),
    ],
)
def test_plans(fields, error, message):
    with pytest.raises(error) as caught:
        TurboQuantPlan(**fields)
    assert message in str(caught.value)


def test_the_sources_rules():
    rule = functools.partial(TurboQuantPlan.source, group=4)
    assert rule(max_query_len=1, max_seq_len=1023).num_splits == 1
    assert rule(max_query_len=1, max_seq_len=1024).num_splits == 16
    assert rule(max_query_len=1, max_seq_len=8192, num_kv_splits=600).num_splits == 512
    prefill = rule(max_query_len=2, max_seq_len=8192)
    assert (prefill.num_splits, prefill.block_m, prefill.block_n) == (1, 128, 32)


CACHE, TOKENS = u8(2, 3, 2, 22), f32(4, 2, 16)
STORE = {"kv_cache": CACHE, "key": TOKENS, "value": TOKENS, "slot_mapping": i32(4)}
STORE |= {"format": FORMAT, **codebook(FORMAT)}
STORE_VALUES = [
    (STORE, "kv_cache", u8(2, 3, 2, 24), "expected [num_blocks, 3, 2, 22]"),
    (STORE, "key", f32(4, 32), "got shape (4, 32), expected [N, 2, 16]"),
    (STORE, "value", f32(3, 2, 16), "got shape (3, 2, 16), expected [4, 2, 16]"),
    (STORE, "slot_mapping", i32(3), "got shape (3,), expected [4]"),
    (STORE, "rotation", None, "rotation: got None, expected an array"),
    (STORE, "centroids", f32(15), "got shape (15,), expected [16]"),
]
STORE_TYPES = [
    (STORE, "key", i32(4, 2, 16), "got dtype int32, expected bfloat16, float16, float32"),
    (STORE, "value", None, "value: got NoneType, expected an array"),
    (STORE, "slot_mapping", f32(4), "got dtype float32, expected int32 or int64"),
    (STORE, "kv_cache", i32(2, 3, 2, 22), "got dtype int32, expected uint8"),
    (STORE, "format", None, "format: got NoneType, expected TurboQuantFormat"),
]


@pytest.mark.parametrize("call, name, value, message", STORE_VALUES, ids=names_of(STORE_VALUES))
def test_store_values(call, name, value, message):
    assert_refused(turboquant_store, call, name, value, message, ValueError)


@pytest.mark.parametrize("call, name, value, message", STORE_TYPES, ids=names_of(STORE_TYPES))
def test_store_types(call, name, value, message):
    assert_refused(turboquant_store, call, name, value, message, TypeError)


DEQUANTIZE = {"kv_cache": CACHE, "format": FORMAT, "centroids": f32(16)}


@pytest.mark.parametrize(
    "name, value, message, error",
    [
        ("kv_cache", u8(2, 3, 22), "expected [num_blocks, 3, 2, 22]", ValueError),
        ("centroids", None, "centroids: got None, expected an array", ValueError),
        ("centroids", f32(8), "got shape (8,), expected [16]", ValueError),
        ("format", 4, "got int, expected TurboQuantFormat", TypeError),
    ],
)
def test_dequantize(name, value, message, error):
    assert_refused(turboquant_dequantize, DEQUANTIZE, name, value, message, error)


def test_caches_of_2_to_the_31_slots():
    format = TurboQuantFormat(8, 1, 128, 3, 3, False)
    cache = jax.ShapeDtypeStruct(format.cache_shape(2**24), np.uint8)
    dequantize = functools.partial(turboquant_dequantize, format=format, centroids=f32(8))
    with pytest.raises(ValueError, match=r"kv_cache: got 16777216 blocks .* less than 2\*\*31"):
        jax.eval_shape(dequantize, cache)


def test_a_kernel_on_a_cpu():
    with pytest.raises(ValueError, match=r"implementation='triton' runs on CUDA GPUs only"):
        turboquant_attention(**MIXED, implementation="triton")
