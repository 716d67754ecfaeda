"""The kernels compile for every architecture served, and few of them serve many shapes."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jax_beam_attn import (
    TurboQuantFormat,
    TurboQuantPlan,
    turboquant_attention,
    turboquant_decode_attention,
    turboquant_store,
)
from jax_beam_attn._core import availability
from jax_beam_attn._core.target import TARGETS
from tests.compiled import ARCHS, PTXAS, assemble, export_for, products_of_registers, ptx_of

_NO_TRITON = availability.triton_unavailable(TARGETS["h200"])
pytestmark = pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))


def _export(
    gpu,
    *,
    key_bits=4,
    value_bits=4,
    head_dim=128,
    kv_heads=8,
    group=4,
    requests=16,
    queries=None,
    context=8192,
    block_size=16,
    dtype=jnp.bfloat16,
    sinks=False,
    **static,
):
    array, index = jax.ShapeDtypeStruct, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    format = TurboQuantFormat(head_dim, kv_heads, block_size, key_bits, value_bits, True)
    heads, fp8 = kv_heads * group, key_bits == 8
    max_blocks = -(-context // block_size)
    call = {
        "query": array((requests * (queries or 1), heads, head_dim), dtype),
        "kv_cache": array(format.cache_shape(requests * max_blocks), jnp.uint8),
        "block_table": index((requests, max_blocks)),
        "seq_lens": index((requests,)),
        "rotation": None if fp8 else array((head_dim, head_dim), jnp.float32),
        "centroids": None if fp8 else array((2**key_bits,), jnp.float32),
    }
    function = turboquant_decode_attention
    if queries:
        function = turboquant_attention
        call["query_start_loc"] = index((requests + 1,))
        static["max_query_len"] = queries
    if sinks:
        call["sinks"] = array((heads,), jnp.float32)
    function = functools.partial(function, format=format, implementation="triton", **static)
    return export_for(gpu, lambda call: function(**call), call)


@pytest.mark.parametrize("gpu", ARCHS)
@pytest.mark.parametrize(
    "case",
    [
        {"sinks": True},
        {"key_bits": 3, "value_bits": 3, "head_dim": 64, "group": 8, "block_size": 64},
        {"key_bits": 8, "queries": 4, "logits_soft_cap": 5.0, "context": 100},
        {"queries": 512, "sliding_window": 100},
        {"key_bits": 3, "head_dim": 256, "group": 64},
        {"key_bits": 3, "head_dim": 80, "block_size": 9, "kv_heads": 1},
        {"dtype": jnp.float32, "queries": 3, "plan": TurboQuantPlan(rotation="separate")},
    ],
    ids=["4-bit", "3-bit", "fp8 verify", "prefill", "wide", "odd", "float32"],
)
def test_compiles(gpu, case, tmp_path):
    kernels = ptx_of(_export(gpu, **case))
    assert kernels and all(f".target {ARCHS[gpu]}" in ptx for ptx in kernels)
    if PTXAS is not None:
        for ptx in kernels:
            assert "registers" in assemble(ptx, ARCHS[gpu], tmp_path)


def test_few_kernels_serve_many_shapes():
    """Requests, heads of a group, lengths and the number of splits are run-time scalars."""
    from jax_beam_attn._core.merge_triton import merge_kernel
    from jax_beam_attn.turboquant.kernel_triton import attend_kernel

    plan = functools.partial(TurboQuantPlan, block_m=16, block_n=64)
    _export("h200", plan=plan(num_splits=2))
    compiled = len(attend_kernel._jT_kernel_cache), len(merge_kernel._jT_kernel_cache)
    for n in range(10):
        sizes = {"requests": 1 + n, "group": 1 + n, "context": 100 * (n + 1)}
        _export("h200", plan=plan(num_splits=2 + n), **sizes)
    assert (len(attend_kernel._jT_kernel_cache), len(merge_kernel._jT_kernel_cache)) == compiled


@pytest.mark.parametrize("key_bits", [4, 8])
@pytest.mark.parametrize("block_m, num_warps", [(64, 4), (128, 8)])
def test_queries_of_wide_tiles_are_no_operands_in_registers(block_m, num_warps, key_bits):
    """Keys are fp16, values bf16."""
    plan = TurboQuantPlan(block_m=block_m, num_warps=num_warps, dequantize=False)
    (attend, *_) = ptx_of(_export("h200", queries=512, key_bits=key_bits, plan=plan))
    assert "f32.f16.f16" in attend
    assert set(products_of_registers(attend)) == {"f32.bf16.bf16"}


@pytest.mark.parametrize(
    "plan, group, message",
    [
        (
            TurboQuantPlan(block_m=128, block_n=256, num_stages=4),
            4,
            r"plan needs \d+ bytes of shared memory.*A100",
        ),
        (TurboQuantPlan(block_m=16), 32, r"plan.block_m = 16 is less than the 32 query heads"),
        (
            TurboQuantPlan(block_m=64, rotation="fused", swapped=False),
            4,
            "plan.rotation = 'fused' needs swapped=True or block_m < 64",
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan, group, message):
    with pytest.raises(ValueError, match=message):
        _export("a100", plan=plan, group=group, head_dim=256)


@pytest.mark.parametrize("gpu", ARCHS)
@pytest.mark.parametrize("key_bits, value_bits, head_dim", [(4, 4, 128), (3, 3, 80), (8, 4, 256)])
def test_the_cache_writer_compiles_and_writes_in_place(
    gpu, key_bits, value_bits, head_dim, tmp_path
):
    format = TurboQuantFormat(head_dim, 8, 16, key_bits, value_bits, True)
    array, fp8 = jax.ShapeDtypeStruct, key_bits == 8
    exported = export_for(
        gpu,
        functools.partial(turboquant_store, format=format),
        array(format.cache_shape(100), jnp.uint8),
        *[array((64, 8, head_dim), jnp.bfloat16)] * 2,
        array((64,), jnp.int32),
        rotation=None if fp8 else array((head_dim, head_dim), jnp.float32),
        centroids=None if fp8 else array((2**key_bits,), jnp.float32),
    )
    (kernel,) = ptx_of(exported)
    assert f".target {ARCHS[gpu]}" in kernel
    assert "output_operand_alias" in exported.mlir_module()
    if PTXAS is not None:
        assert "registers" in assemble(kernel, ARCHS[gpu], tmp_path)


@pytest.mark.parametrize("bits", [3, 4])
def test_packed_keys_stay_in_their_registers(bits):
    """Of a tile only values go through shared memory on their way into the products."""
    exported = _export("h200", key_bits=bits, value_bits=bits)
    ptx = next(ptx for ptx in ptx_of(exported) if "wgmma" in ptx)
    matrices = re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.(?:trans\.)?shared", ptx)
    values = [matrix for matrix in matrices if ".trans." in matrix]
    assert len(values) == 16 and len(matrices) - len(values) <= 2
