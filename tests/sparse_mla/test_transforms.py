"""The operator inside jit, scan, export and shard_map, with 64-bit numbers, and its executables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_beam_attn import append_mla_cache, mla_schedule, sparse_mla_decode
from tests.sparse_mla.calls import FORMATS, STATIC, Shape, check, make_call

SIZES = {"batch": 2, "seqlen_q": 3, "num_heads": 4, "topk": 7, "extra_topk": 4}


def _full_call(format, **more):
    """A call with every optional operand, all integers int64."""
    return make_call(
        Shape(format=format, padded=format == "v32", extra_topk=4),
        topk_length=np.array([7, 2]),
        extra_topk_length=np.array([[4, 0, 1], [2, 3, 9]]),
        attn_sink=np.array([0.5, -1, 2, 0], np.float32),
        softmax_scale=np.array(0.05, np.float32),
        **more,
    )


def _split(call):
    """A call's arrays, and the function of them."""
    static = {name: x for name, x in call.items() if name in STATIC}
    arrays = {name: x for name, x in call.items() if name not in STATIC}
    return arrays, functools.partial(sparse_mla_decode, return_lse=True, **static)


def test_one_executable_for_all_sinks_and_scales():
    traces = []

    @jax.jit
    def function(call):
        traces.append(1)
        return sparse_mla_decode(return_lse=True, **call)

    for seed in range(3):
        call = make_call(Shape(format="model1"), seed)
        call["softmax_scale"] = np.array(0.02 * (1 + seed), np.float32)
        call["attn_sink"] = np.full(4, seed - 1, np.float32)
        call["topk_length"] = np.array([[seed, 7, 3 * seed], [0, -seed, 9]], np.int32)
        check(call, function(call))
    assert len(traces) == 1


@pytest.mark.parametrize("format", FORMATS)
def test_64_bit_mode_computes_the_same(format):
    """float32 stays float32, and nothing relies on implicit promotion of dtypes or ranks."""
    call = _full_call(format)
    for name in ("indices", "extra_indices"):
        call[name] = call[name].astype(np.int64)
        call[name][0, 0, :2] = [2**32, -(2**32) + 1]  # slots 0 and 1 if they were wrapped
    arrays, function = _split(call)
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.enable_x64(True), strict[0], strict[1]:
        wide = arrays | {"attn_sink": np.float64(arrays["attn_sink"])}
        result = jax.jit(lambda call: function(**call))(wide)
        assert [x.dtype for x in result] == [jnp.bfloat16, jnp.float32]
        eager = function(**arrays)
    check(call, result)
    check(call, eager)


def test_64_bit_integers_outside_64_bit_mode():
    call = _full_call("model1")
    call["indices"] = call["indices"].astype(np.int64)
    call["indices"][..., 0] = 2**32
    call["topk_length"] = np.array([2**32, -(2**32) + 7])
    arrays, function = _split(call)
    check(call, function(**arrays))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_other_widths_of_integers(dtype):
    call = make_call(Shape(), topk_length=np.array([3, 200], dtype=np.uint8))
    call["indices"] = call["indices"].astype(dtype)
    call["indices"][..., 0] = np.iinfo(dtype).max
    check(call, sparse_mla_decode(return_lse=True, **call))


def test_lists():
    call = make_call(Shape(extra_topk=2), topk_length=[7, 2], attn_sink=[0.0, 1.0, 2.0, 3.0])
    lists = call | {n: call[n].tolist() for n in ("indices", "extra_indices")}
    check(call, sparse_mla_decode(return_lse=True, **lists))


@pytest.mark.parametrize("format", FORMATS)
def test_64_bit_mode_without_blocks(format):
    call = make_call(Shape(format=format, num_blocks=0, extra_topk=2))
    arrays, function = _split(call)
    with jax.enable_x64(True):
        check(call, jax.jit(lambda call: function(**call))(arrays))


def test_under_disable_jit():
    call = _full_call("model1")
    with jax.disable_jit():
        check(call, sparse_mla_decode(return_lse=True, **call))


def test_eval_shape_and_weak_types():
    call = _full_call("model1") | {"softmax_scale": 0.5}
    out = jax.eval_shape(lambda call: sparse_mla_decode(**call), _split(call)[0])
    assert (out.shape, out.dtype) == ((2, 3, 4, 512), jnp.bfloat16)
    for result in sparse_mla_decode(return_lse=True, **call):
        assert not result.weak_type


def test_the_reference_asks_for_full_precision():
    """A GPU's default for float32 is TF32; an oracle has to say no to that."""
    arrays, function = _split(make_call(Shape(), implementation="reference"))
    program = jax.jit(lambda call: function(**call)).lower(arrays).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products
    assert all("[HIGHEST, HIGHEST]" in product for product in products)


@pytest.mark.parametrize("format", FORMATS)
def test_export(format):
    """A whole step: schedule, append and attention, with the schedule as argument too."""
    arrays, function = _split(_full_call(format))
    page_size = 3 if format == "v32" else None
    key = np.random.default_rng(0).standard_normal((1, arrays["q"].shape[-1])).astype(np.float32)
    slot = np.array([5], np.int32)
    made = mla_schedule(**SIZES)

    def step(call, key, slot, schedule):
        cache = append_mla_cache(call["kv_cache"], key, slot, format, page_size)
        own = mla_schedule(call["topk_length"], **SIZES)
        call = call | {"kv_cache": cache}
        return function(**call, schedule=schedule), function(**call, schedule=own), cache

    arguments = ({n: x.astype(np.int32) if x.dtype == int else x for n, x in arrays.items()},)
    arguments += (key, slot, made)
    exported = jax.export.export(jax.jit(step), platforms=["cpu"])(*arguments)
    first, second, cache = jax.export.deserialize(exported.serialize()).call(*arguments)
    call = _full_call(format) | {"kv_cache": np.asarray(cache)}
    check(call, first)
    check(call, second)


def test_export_for_cuda_of_the_reference():
    arrays, function = _split(make_call(Shape(), implementation="reference"))
    export = jax.export.export(jax.jit(lambda call: function(**call)), platforms=["cpu", "cuda"])
    assert export(arrays).platforms == ("cpu", "cuda")


@pytest.mark.parametrize("with_schedule", [False, True])
def test_shard_map_over_requests(with_schedule):
    """A request on each of 8 devices; the cache is on all of them."""
    call = make_call(Shape(batch=8, extra_topk=4), topk_length=np.arange(8, dtype=np.int32))
    call["attn_sink"] = np.array([0, -1, 1, 3], np.float32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = ("q", "indices", "extra_indices", "topk_length")
    specs = {name: P("x") if name in split else P() for name in call}

    def function(call):
        sizes = SIZES | {"batch": call["q"].shape[0]}
        schedule = mla_schedule(call["topk_length"], **sizes) if with_schedule else None
        return sparse_mla_decode(return_lse=True, schedule=schedule, **call)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, in_specs=(specs,), out_specs=P("x"))
        check(call, jax.jit(mapped)(call))


def test_shard_map_over_heads_and_caches():
    """Heads on two devices, pools on four: each pool has its own requests."""
    call = make_call(Shape(batch=4, heads=8, num_blocks=8, format="model1"))
    mesh = jax.make_mesh((4, 2), ("b", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"q": P("b", None, "h"), "kv_cache": P("b"), "indices": P("b")}
    call["indices"] = call["indices"] % 6  # two blocks of three tokens

    def function(call):
        return sparse_mla_decode(return_lse=True, **call)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, in_specs=(specs,), out_specs=P("b", None, "h"))
        result = jax.jit(mapped)(call)
    whole = call | {"indices": call["indices"] + 6 * np.arange(4, dtype=np.int32)[:, None, None]}
    check(whole, result)


def test_shard_map_of_append():
    from tests.sparse_mla.test_append import appended, keys_for, poisoned

    cache, keys = poisoned("model1", None, np.uint8, blocks=8), keys_for(8, "model1")
    slots = np.array([0, 1, 2, -1, 2, 3, 0, 7], np.int32)  # of one device's block of 3 slots
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        function = functools.partial(append_mla_cache, format="model1")
        got = jax.shard_map(function, in_specs=(P("x"),) * 3, out_specs=P("x"))(cache, keys, slots)
    inside = (slots >= 0) & (slots < 3)
    global_slots = np.where(inside, slots + 3 * np.arange(8), -1)
    np.testing.assert_array_equal(got, appended(cache, keys, global_slots, "model1"))
