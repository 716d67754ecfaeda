"""Kernels of both compilers, compiled on a host without a GPU, exported and inspected."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest

import jax_beam_attn
from jax_beam_attn._core import availability
from jax_beam_attn._core.target import TARGETS
from tests.compiled import ARCHS, PTXAS, assemble, export_for, ptx_of
from tests.core.row_sum import operator, row_sum

_NO_TRITON = availability.triton_unavailable(TARGETS["h200"])
_NO_CUTE = availability.cute_unavailable(TARGETS["h200"])
needs_triton = pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))
needs_cute = pytest.mark.skipif(_NO_CUTE is not None, reason=str(_NO_CUTE))


def _export(gpu, implementation=None, shape=(3, 100), platforms=("cuda",)):
    return export_for(
        gpu,
        functools.partial(row_sum, implementation=implementation),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape[:1], jnp.int32),
        platforms=platforms,
    )


@needs_triton
@pytest.mark.parametrize("gpu", ARCHS)
def test_triton_compiles_and_exports(gpu):
    exported = _export(gpu, "triton")
    assert "triton_kernel_call_ffi" in jax.export.deserialize(exported.serialize()).mlir_module()
    (ptx,) = ptx_of(exported)
    assert f".target {ARCHS[gpu]}" in ptx
    assert ".version 8.8" in ptx  # what CUDA 12.9's and every CUDA 13 assembler reads


@needs_triton
@pytest.mark.skipif(PTXAS is None, reason="no ptxas on PATH")
@pytest.mark.parametrize("gpu", ARCHS)
def test_ptx_is_accepted_by_the_assembler(gpu, tmp_path):
    (ptx,) = ptx_of(_export(gpu, "triton"))
    assert "registers" in assemble(ptx, ARCHS[gpu], tmp_path)


@needs_cute
@pytest.mark.parametrize("gpu", ["h200", "b200"])
def test_cute_compiles_and_exports(gpu):
    exported = _export(gpu, "cute")
    assert (
        "CuteDSLRT_NvJaxCutlassCall" in jax.export.deserialize(exported.serialize()).mlir_module()
    )
    assert len(exported.serialize()) > 10_000  # the object code is inside


@needs_cute
def test_cute_refuses_other_architectures():
    with pytest.raises(ValueError, match=r"row_sum: implementation='cute' cannot serve.*sm_80"):
        _export("a100", "cute")


@needs_triton
def test_one_triton_kernel_serves_all_sizes():
    from tests.core.row_sum_triton import row_sum_kernel

    _export("h200", "triton", (7, 9))
    compiled = len(row_sum_kernel._jT_kernel_cache)
    for n in range(1, 21):
        _export("h200", "triton", (n, 16 * n + n % 3))
    assert len(row_sum_kernel._jT_kernel_cache) == compiled


@needs_cute
def test_one_cute_kernel_serves_all_sizes():
    from cutlass.jax import compile as cutlass_compile

    _export("h200", "cute", (7, 9))
    compiled = len(cutlass_compile._CUTLASS_COMPILE_CACHE)
    for n in range(1, 21):
        _export("h200", "cute", (n, 16 * n + n % 3))
    assert len(cutlass_compile._CUTLASS_COMPILE_CACHE) == compiled


@needs_triton
@needs_cute
def test_the_best_supported_implementation_is_taken():
    assert "CuteDSLRT" in _export("h200").mlir_module()
    assert "triton_kernel_call_ffi" in _export("a100").mlir_module()
    assert "custom_call" not in _export("h200", "reference").mlir_module()


@needs_triton
def test_export_for_both_platforms_carries_both_codes():
    exported = _export("a100", platforms=("cpu", "cuda"))
    assert "triton_kernel_call_ffi" in exported.mlir_module()
    x = jnp.ones((3, 100))
    got = jax.export.deserialize(exported.serialize()).call(x, jnp.array([1, 2, 200], jnp.int32))
    assert got.tolist() == [1.0, 2.0, 100.0]


def test_no_kernel_is_launched_for_nothing():
    assert "custom_call" not in _export("h200", shape=(0, 100)).mlir_module()
    assert "custom_call" not in _export("h200", shape=(3, 0)).mlir_module()


@needs_triton
def test_without_a_target_the_reference_is_used_with_a_warning():
    args = jnp.ones((3, 100)), jnp.ones((3,), jnp.int32)
    export = jax.export.export(jax.jit(row_sum), platforms=["cuda"])
    with pytest.warns(UserWarning, match="gpu_target"):
        assert "custom_call" not in export(*args).mlir_module()
    explicit = jax.jit(functools.partial(row_sum, implementation="triton"))
    with pytest.raises(ValueError, match="gpu_target"):
        jax.export.export(explicit, platforms=["cuda"])(*args)


@needs_triton
def test_target_is_part_of_the_cache_key():
    """The same jitted function, traced under two targets, gives two programs."""
    function = jax.jit(functools.partial(row_sum, implementation="triton"))
    args = jax.ShapeDtypeStruct((3, 8), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)
    checks = jax_beam_attn.export_disabled_checks()
    texts = []
    for gpu in ("a100", "h200"):
        with jax_beam_attn.gpu_target(gpu):
            export = jax.export.export(function, platforms=["cuda"], disabled_checks=checks)
            texts += ptx_of(export(*args))
    assert "sm_80" in texts[0] and "sm_90a" in texts[1]


def test_missing_compilers_leave_the_reference(monkeypatch):
    """Without the gpu extra the program is still right, only slower."""
    monkeypatch.setattr(operator, "implementations", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "custom_call" not in _export("h200").mlir_module()
