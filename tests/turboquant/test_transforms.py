"""The operator inside jit, scan, export and shard_map, with 64-bit numbers, and its executables."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jax_beam_attn import TurboQuantFormat, turboquant_decode_attention, turboquant_store
from tests.tolerances import REORDERED, assert_out_close
from tests.turboquant import oracle
from tests.turboquant.calls import (
    Shape,
    arrays_of,
    check,
    codebook,
    function_of,
    make_call,
)

SHAPE = Shape()
FULL = {
    "sinks": np.array([0.5, -1, 2, 0, 1, -2], np.float32),
    "softmax_scale": np.array(0.3, np.float32),
}


@pytest.mark.parametrize("queries", [None, (2, 1, 4)])
def test_one_executable_for_all_lengths_sinks_and_scales(queries):
    traces = []
    function = function_of(make_call(Shape(queries=queries)))

    @jax.jit
    def step(arrays):
        traces.append(1)
        return function(**arrays)

    for seed, lengths in enumerate(([11, 5, 7], [0, 12, 3], [2, -1, 100])):
        call = make_call(Shape(queries=queries), seed, **FULL)
        call["seq_lens"] = np.array(lengths, np.int32)
        call["sinks"] = call["sinks"] * seed
        call["softmax_scale"] = np.array(0.1 + 0.1 * seed, np.float32)
        if queries:
            call["query_start_loc"] = np.array([0, seed, 2 * seed, 7], np.int32)
        check(call, step(arrays_of(call)))
    assert len(traces) == 1


def test_64_bit_mode_computes_the_same():
    """float32 stays float32, and nothing relies on implicit promotion of dtypes or ranks."""
    for shape in (SHAPE, Shape(queries=None, key_bits=8), Shape(key_bits=3, value_bits=3)):
        call = make_call(shape, **FULL, sliding_window=5)
        for name in ("block_table", "seq_lens", "query_start_loc"):
            if name in call:
                call[name] = call[name].astype(np.int64)
        call["block_table"][1, 0] = 2**32 + 1  # block 1 if it were wrapped
        function = function_of(call)
        strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
        with jax.enable_x64(True), strict[0], strict[1]:
            wide = arrays_of(call) | {"sinks": np.float64(call["sinks"])}
            result = jax.jit(lambda arrays, function=function: function(**arrays))(wide)
            assert [x.dtype for x in result] == [jnp.float32, jnp.float32]
            eager = function(**arrays_of(call))
        check(call, result)
        check(call, eager)


def test_64_bit_integers_outside_64_bit_mode():
    call = make_call(SHAPE)
    call["seq_lens"] = np.array([2**32, -(2**32) + 7, 3])
    call["block_table"] = call["block_table"].astype(np.int64) + np.array([[0, 0, 0, 2**32]])
    check(call, function_of(call)(**arrays_of(call)))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint32])
def test_other_widths_of_integers(dtype):
    call = make_call(SHAPE)
    for name in ("block_table", "seq_lens", "query_start_loc"):
        call[name] = call[name].astype(dtype)
    call["block_table"][0, 0] = np.iinfo(dtype).max
    check(call, function_of(call)(**arrays_of(call)))


def test_lists():
    call = make_call(SHAPE, sinks=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    names = ("block_table", "seq_lens", "query_start_loc")
    check(call, function_of(call)(**arrays_of(call) | {n: call[n].tolist() for n in names}))


def test_under_disable_jit():
    call = make_call(SHAPE, **FULL)
    with jax.disable_jit():
        check(call, function_of(call)(**arrays_of(call)))


def test_eval_shape_and_weak_types():
    call = make_call(Shape(dtype="bfloat16"), softmax_scale=0.5)
    out, lse = jax.eval_shape(lambda arrays: function_of(call)(**arrays), arrays_of(call))
    assert (out.shape, out.dtype) == ((7, 6, 16), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((7, 6), jnp.float32)
    assert not any(result.weak_type for result in function_of(call)(**arrays_of(call)))


def test_the_reference_asks_for_full_precision():
    """A GPU's default for float32 is TF32; an oracle has to say no to that."""
    call = make_call(SHAPE, implementation="reference")
    program = jax.jit(lambda arrays: function_of(call)(**arrays)).lower(arrays_of(call)).as_text()
    products = [line for line in program.splitlines() if "dot_general" in line]
    assert products and all("[HIGHEST, HIGHEST]" in product for product in products)


def test_transposed_and_sliced_operands():
    """Inside jit an operand may come in any layout; the operator asks for row-major."""
    call = make_call(SHAPE, **FULL)
    arrays = arrays_of(call)

    def wrap(x):
        """Reversed axes, every second element of a longer last axis, an odd start."""
        wide = np.repeat(np.asarray(x), 2, axis=-1)
        return np.pad(wide, [(1, 0)] * x.ndim, constant_values=7).T

    def unwrap(x):
        return x.T[(slice(1, None),) * x.ndim][..., ::2]

    wrapped = {name: wrap(x) if x.ndim else x for name, x in arrays.items()}

    @jax.jit
    def function(wrapped):
        return function_of(call)(**{n: unwrap(x) if x.ndim else x for n, x in wrapped.items()})

    check(call, function(wrapped))


def test_export_for_other_platforms():
    """Without a GPU named, a program for CUDA holds the reference too."""
    call = make_call(SHAPE, **FULL)
    exported = jax.export.export(
        jax.jit(lambda arrays: function_of(call | {"implementation": "reference"})(**arrays)),
        platforms=["cpu", "cuda", "tpu"],
    )(arrays_of(call))
    check(call, jax.export.deserialize(exported.serialize()).call(arrays_of(call)))


def _four_devices():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((4,), ("x",), axis_types=auto, devices=jax.devices()[:4])


def test_shard_map_over_heads():
    """Tensor parallelism: KV heads, and the query heads of each, over four devices."""
    shape = Shape(heads=8, kv_heads=4, lengths=(5, 3), queries=(2, 1), num_blocks=5)
    call = make_call(shape, sinks=np.arange(8, dtype=np.float32))
    part = dataclasses.replace(call["format"], num_kv_heads=1)
    # A device's cache holds its own heads: blocks are made of whole blocks of one head.
    caches = [_of_head(call, head, part) for head in range(4)]
    mesh = _four_devices()
    specs = {name: P() for name in arrays_of(call)}
    specs |= {"query": P(None, "x"), "kv_cache": P(None, None, "x"), "sinks": P("x")}
    function = function_of(call | {"format": part})
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            lambda arrays: function(**arrays),
            in_specs=(specs,),
            out_specs=(P(None, "x"), P(None, "x")),
        )
        sharded = jax.jit(mapped)(
            arrays_of(call) | {"kv_cache": np.concatenate(caches, axis=2)},
        )
    check(call, sharded)


def _of_head(call, head, part):
    """The cache of one KV head alone."""
    format, cache = call["format"], call["kv_cache"]
    flat = cache.reshape(len(cache), -1)
    alone = np.zeros((len(cache), part.block_bytes), np.uint8)
    key, value, *_ = oracle.sizes(format)
    for offset in range(format.block_size):
        data, metadata = oracle.places(format, offset, head)
        to_data, to_metadata = oracle.places(part, offset, 0)
        alone[:, to_data : to_data + key + value] = flat[:, data : data + key + value]
        for byte, to_byte in zip(metadata, to_metadata, strict=True):
            alone[:, to_byte : to_byte + 2] = flat[:, byte : byte + 2]
    return alone.reshape(part.cache_shape(len(cache)))


def test_shard_map_over_requests():
    call = make_call(Shape(lengths=(5, 3, 2, 6), queries=None, num_blocks=8))
    mesh = _four_devices()
    batched = ("query", "block_table", "seq_lens")
    specs = {name: P("x") if name in batched else P() for name in arrays_of(call)}
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            lambda arrays: function_of(call)(**arrays),
            in_specs=(specs,),
            out_specs=(P("x"), P("x")),
        )
        check(call, jax.jit(mapped)(arrays_of(call)))


@pytest.mark.parametrize("preset", ["4bit_nc", "k8v4"])
def test_a_decode_loop_in_scan(preset):
    """Store, attend, and again; against attention over all keys and values stored so far."""
    steps, batch, heads = 7, 2, 4
    format = TurboQuantFormat.preset(preset, head_dim=16, num_kv_heads=2, block_size=3)
    book = codebook(format)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((steps, batch, heads, 16)).astype(np.float32)
    key, value = rng.standard_normal((2, steps, batch, 2, 16)).astype(np.float32)
    table = np.array([[5, 1, 3], [0, 4, 2]], np.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache, q, key, value):
        def step(carry, x):
            cache, t = carry
            q, key, value = x
            slots = jnp.asarray(table)[:, t // 3] * 3 + t % 3
            cache = turboquant_store(cache, key, value, slots, format=format, **book)
            lengths = jnp.full(batch, t + 1)
            out = turboquant_decode_attention(q, cache, table, lengths, format=format, **book)
            return (cache, t + 1), out

        return jax.lax.scan(step, (cache, jnp.int32(0)), (q, key, value))

    (cache, _), out = decode(jnp.full(format.cache_shape(6), 0xFF, jnp.uint8), q, key, value)
    for t in range(steps):
        call = {"query": q[t], "kv_cache": np.asarray(cache), "block_table": table}
        call |= {"seq_lens": np.full(batch, t + 1), "format": format, **book}
        assert_out_close(out[t], oracle.attention(**call)[0], REORDERED)
