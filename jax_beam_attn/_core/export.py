"""Exporting programs that contain kernels."""

from __future__ import annotations

import jax

from jax_beam_attn._core import native

# Stable names: jax-triton's and CuTe-DSL's FFI targets (the CuTe runtime has one for each
# version of its calling convention, with and without CUDA-graph capture), and this library's.
_CUSTOM_CALL_TARGETS = (
    "triton_kernel_call_ffi",
    "CuteDSLRT_NvJaxCutlassCall_v1",
    "CuteDSLRT_NvJaxCutlassCall_v2",
    "CuteDSLRT_NvJaxCutlassCallNoCudaGraph_v1",
    "CuteDSLRT_NvJaxCutlassCallNoCudaGraph_v2",
    *native.HANDLERS,
)


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The `disabled_checks` for `jax.export.export` of programs that use this library.

    `jax.export` refuses custom calls that it does not know. A program with Triton kernels runs
    wherever JAX does; one with CuTe kernels needs `libcute_dsl_runtime.so` on the GPU machine, and
    one with native handlers (`append_mla_cache` and `mla_schedule` where CUDA code was built) needs
    `register_native_handlers()` in the process that runs it. On CPUs an exported program has none.

    Returns:
        The checks to disable.

    Example:
        >>> import jax, jax_beam_attn
        >>> checks = jax_beam_attn.export_disabled_checks()
        >>> exported = jax.export.export(jax.jit(lambda x: x), disabled_checks=checks)(1.0)
    """
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALL_TARGETS]


def register_native_handlers() -> None:
    """Lets exported programs that were loaded into this process find the native handlers.

    Not needed where the operators themselves are called, nor for programs without native handlers.

    Example:
        >>> import jax_beam_attn
        >>> jax_beam_attn.register_native_handlers()
    """
    for name, parts in native.HANDLERS.items():
        for part in parts:
            native.register(name, part)
