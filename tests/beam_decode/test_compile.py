"""The kernels compile for every architecture served, and few of them serve many shapes."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_beam_attn import BeamDecodePlan, beam_decode_attn
from jax_beam_attn._core import availability
from jax_beam_attn._core.target import TARGETS
from tests.compiled import ARCHS, PTXAS, assemble, export_for, products_of_registers, ptx_of

_NO_TRITON = availability.triton_unavailable(TARGETS["h200"])
pytestmark = pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))


_NO_CUTE = availability.cute_unavailable(TARGETS["h200"])
needs_cute = pytest.mark.skipif(_NO_CUTE is not None, reason=str(_NO_CUTE))


def _export(
    gpu,
    *,
    implementation="triton",
    dtype=jnp.bfloat16,
    head_dim=128,
    width=64,
    batch=2,
    page_size=None,
    **static,
):
    array = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    index = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    q = array((batch, 1, width, 8, head_dim))
    context = array((batch, 4096, 4, head_dim))
    more = {}
    if page_size:
        context = array((300, page_size, 4, head_dim))
        more = {"seqused_k": index((batch,)), "block_tables": index((batch, 4096 // page_size))}
    beam = array((batch, 3 * width, 4, head_dim))
    rows = index((batch, 1, 1, 3, width))
    function = functools.partial(beam_decode_attn, implementation=implementation, **static)
    call = {"topk_indices": rows, "decode_nums": index(()), "k_beam": beam, "v_beam": beam, "q": q}
    call |= {"k_context": context, "v_context": context} | more
    return export_for(gpu, lambda call: function(**call), call)


@pytest.mark.parametrize("gpu", ARCHS)
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"plan": BeamDecodePlan(pipeline="3kernel", num_splits=4)},
        {"page_size": 64, "head_dim": 64},
        {"page_size": 10, "head_dim": 256, "dtype": jnp.float16},
        {"dtype": jnp.float32, "width": 2},
    ],
    ids=["fused", "3kernel", "paged", "odd pages", "float32"],
)
def test_compiles(gpu, case, tmp_path):
    kernels = ptx_of(_export(gpu, **case))
    assert kernels and all(f".target {ARCHS[gpu]}" in ptx for ptx in kernels)
    if PTXAS is not None:
        for ptx in kernels:
            assert "registers" in assemble(ptx, ARCHS[gpu], tmp_path)


def test_a_traced_scale_leaves_queries_in_shared_memory():
    """Only the weights are an operand in registers, as with a scale that is known."""
    (known,), (traced,) = (
        ptx_of(_export("h200", softmax_scale=scale, plan=BeamDecodePlan(num_splits=1)))
        for scale in (0.1, jnp.float32(0.1))
    )
    assert known.count("wgmma.mma_async") == traced.count("wgmma.mma_async")
    assert len(products_of_registers(traced)) == len(products_of_registers(known)) > 0


def test_few_kernels_serve_many_shapes():
    """Batch, width and the number of splits are run-time scalars."""
    from jax_beam_attn._core.merge_triton import merge_kernel
    from jax_beam_attn.beam_decode.kernel_triton import attend_kernel

    _export("h200", width=65, plan=BeamDecodePlan(num_splits=2))
    compiled = len(attend_kernel._jT_kernel_cache), len(merge_kernel._jT_kernel_cache)
    for n in range(20):
        _export("h200", width=66 + n, batch=1 + n, plan=BeamDecodePlan(num_splits=2 + n))
    assert (len(attend_kernel._jT_kernel_cache), len(merge_kernel._jT_kernel_cache)) == compiled


def test_a_plan_that_does_not_fit_is_refused():
    plan = BeamDecodePlan(block_m=128, block_n=256, num_stages=4)
    with pytest.raises(ValueError, match=r"plan needs \d+ bytes of shared memory.*A100"):
        _export("a100", plan=plan)


@needs_cute
@pytest.mark.parametrize(
    "case",
    [
        {"plan": BeamDecodePlan(num_splits=1)},
        {"plan": BeamDecodePlan(num_splits=2), "width": 8, "head_dim": 192},
        {"plan": BeamDecodePlan(num_splits=40), "head_dim": 96},
        {"page_size": 64, "head_dim": 256, "dtype": jnp.float16, "logits_soft_cap": 5.0},
    ],
    ids=["one pass", "cluster of 192", "split of 96", "paged"],
)
def test_the_hopper_kernel_compiles(case):
    exported = _export("h200", implementation="cute", **case)
    calls = exported.mlir_module().count("@CuteDSLRT_NvJaxCutlassCall")
    merges = exported.mlir_module().count("@triton_kernel_call_ffi")
    # Only splits that no cluster merges, and pages of unknown lengths, need a second kernel.
    assert (calls, merges) == (1, int("page_size" in case or case.get("head_dim") == 96))


@needs_cute
def test_few_hopper_kernels_serve_many_shapes():
    from jax_beam_attn._core import cute_call

    def export(n):
        plan = BeamDecodePlan(num_splits=20 + n)
        _export("h200", implementation="cute", width=65 + n, batch=1 + n, plan=plan)

    export(0)
    compiled = cute_call._compile.cache_info().currsize
    for n in range(1, 20):
        export(n)
    assert cute_call._compile.cache_info().currsize == compiled


@needs_cute
@pytest.mark.parametrize(
    "case, reason",
    [
        ({"dtype": jnp.float32}, "bf16 and fp16, q is float32"),
        ({"page_size": 16}, "page_size 16 is no multiple of the tile's 64 tokens"),
        ({"plan": BeamDecodePlan(pipeline="3kernel")}, "'3kernel' is served by the Triton kernels"),
        ({"plan": BeamDecodePlan(block_m=32)}, "the plan's are 32 x"),
        (
            {"plan": BeamDecodePlan(num_stages=9)},
            "num_stages=9, expected at most 3 for these tiles",
        ),
    ],
)
def test_what_the_hopper_kernel_leaves_to_others(case, reason):
    with pytest.raises(ValueError, match=f"implementation='cute' cannot serve.*{reason}"):
        _export("h200", implementation="cute", **case)


@needs_cute
def test_hopper_gets_its_own_kernel():
    def custom_calls(gpu):
        return _export(gpu, implementation=None).mlir_module()

    assert "CuteDSLRT_NvJaxCutlassCall" in custom_calls("h200")
    assert "CuteDSLRT_NvJaxCutlassCall" not in custom_calls("b200")
