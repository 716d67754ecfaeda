"""Calling CuTe-DSL kernels: what every operator's `kernel_hopper.py` shares.

Imported only while a program with such a kernel is lowered, never by `import jax_beam_attn`.

`cutlass.jax.cutlass_call` compiles one kernel for each combination of shapes, even where the
code does not depend on them. Here the kernel is compiled for a signature (ranks, dtypes and the
sizes declared static) and called with buffers of any shape: CuTe reads run-time sizes from the
buffer descriptors that XLA passes.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.jax import compile as cutlass_compile
from cutlass.jax import ffi as cutlass_ffi
from cutlass.jax.types import TensorSpec

from jax_beam_attn._core.target import GpuTarget


def cute_call(
    launcher: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    target: GpuTarget,
    numbers: Sequence[int] | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Calls `launcher(stream, *arrays, *outputs, **constants)`.

    Args:
        launcher: A `cute.jit` function that launches kernels on the stream.
        arrays: Inputs, row-major.
        outputs: Shapes and dtypes of the outputs.
        target: The GPU to compile for.
        numbers: Non-negative 32-bit numbers that the launcher gets at run time. They come as the
            sizes of one more output, [0, *numbers]: the call has no other scalars that are not
            compiled in.
        **constants: Hashable compile-time constants.

    Returns:
        The outputs.
    """
    count = len(outputs)
    if numbers is not None:
        outputs = [*outputs, jax.ShapeDtypeStruct((0, *numbers), jnp.uint8)]
    signature = tuple((each.ndim, str(each.dtype)) for each in (*arrays, *outputs))
    compiled = _compile(
        launcher, signature, len(arrays), target.arch, tuple(sorted(constants.items()))
    )
    version = cutlass_ffi.get_cutlass_call_ffi_version()
    call = jax.ffi.ffi_call(
        cutlass_ffi.get_cutlass_call_ffi_name(allow_cuda_graph=True, version=version),
        result_shape_dtypes=list(outputs),
    )
    return tuple(call(*arrays, module=compiled.module, key=compiled.fingerprint))[:count]


@functools.cache
def _load_runtime() -> None:
    """Makes the CuTe runtime's symbols visible and registers its calls with JAX.

    Without the symbols, kernels with shared memory do not compile on a host without a GPU.
    """
    library = cutlass_ffi.find_cute_dsl_runtime_library()
    if library is None:
        raise RuntimeError(
            "libcute_dsl_runtime.so not found: reinstall jax-beam-attn[gpu] (nvidia-cutlass-dsl)"
        )
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    cutlass_ffi.register_ffi()


# Cached here as well as in cutlass: its key holds the whole process environment, ours what the
# code depends on.
@functools.cache
def _compile(launcher, signature, num_inputs, arch, constants):
    _load_runtime()

    # Sizes are read at run time: here they are all 1.
    specs = tuple(
        TensorSpec(layout=tuple(reversed(range(rank))), mode=tuple(range(rank)))
        for rank, _ in signature
    )
    arguments = [
        ((1,) * rank, jnp.dtype(dtype), spec)
        for (rank, dtype), spec in zip(signature, specs, strict=True)
    ]
    # Inputs and outputs are numbered apart.
    inputs = tuple(cutlass_compile.Arg(i, *a) for i, a in enumerate(arguments[:num_inputs]))
    outputs = tuple(cutlass_compile.Arg(i, *a) for i, a in enumerate(arguments[num_inputs:]))
    spec = cutlass_compile.FunctionSpec(
        in_args=inputs,
        input_tree=jax.tree.structure(tuple(range(num_inputs))),
        out_args=outputs,
        output_tree=jax.tree.structure(tuple(range(len(outputs)))),
        input_output_aliases=(),
        input_spec=specs[:num_inputs],
        output_spec=specs[num_inputs:],
        compile_options=f"--gpu-arch {arch}",
        use_static_tensors=False,
        kwargs=constants,
    )
    with warnings.catch_warnings():
        # Registers are addressed by constants, so loops over them are unrolled while tracing.
        warnings.simplefilter("ignore", DSLOptimizationWarning)
        return cutlass_compile.get_or_compile_kernel(launcher, spec, compile_key=launcher)
