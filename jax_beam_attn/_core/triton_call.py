"""Calling Triton kernels: what every operator's `kernel_triton.py` shares.

Imported only while a program with such a kernel is lowered, never by `import jax_beam_attn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax_triton

from jax_beam_attn._core.target import GpuTarget

# Triton writes the newest PTX it knows, which the assembler inside XLA may be too old for. Any
# CUDA 13 assembler reads 8.8, and so does CUDA 12.9's. Newer GPUs need what introduced them.
_PTX_VERSION = 88
_PTX_VERSION_OF = {110: 90}

_REGISTERS_PER_SM = 65536
_MAX_REGISTERS = 248  # of a thread, a multiple of 8 as they are allocated


def triton_call(
    kernel: Any,
    arrays: Sequence[Any],
    numbers: tuple[Any, ...],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int] | tuple[int, int] | tuple[int, int, int],
    target: GpuTarget,
    cost: Mapping[str, int] | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    blocks_per_sm: int = 1,
    in_place: Mapping[int, int] | None = None,
    **constants: Any,
) -> tuple[jax.Array, ...]:
    """Calls `kernel(*arrays, numbers, *outputs, **constants)`.

    Args:
        kernel: A `triton.jit` function. Its parameters are the pointers of `arrays` in order, the
            tuple `numbers`, the pointers of `outputs`, then `constexpr`s.
        arrays: Inputs, row-major; a `row_descriptor` for the tensor memory accelerator; None for
            an absent one.
        numbers: Run-time integers and floats, or tuples of them. In a tuple they escape Triton's
            specialisation of values equal to 1, so that one compiled kernel serves all sizes.
        outputs: Shapes and dtypes of the outputs.
        grid: Thread blocks in x, y, z.
        target: The GPU to compile for.
        cost: `flops` and `bytes_accessed`, for XLA.
        num_warps: Warps in a block.
        num_stages: Depth of software pipelining.
        blocks_per_sm: Thread blocks that the registers of one SM have to suffice for.
        in_place: Numbers of arrays to those of the outputs that take their buffers; the kernel has
            one parameter for both, among the inputs.
        **constants: Compile-time constants.

    Returns:
        The outputs.
    """
    capability = target.compute_capability
    options = {
        "ptx_version": _PTX_VERSION_OF.get(capability, _PTX_VERSION),
        "enable_fp_fusion": True,  # the default is about to change
    }
    if blocks_per_sm > 1:
        registers = _REGISTERS_PER_SM // (32 * num_warps * blocks_per_sm)
        options["maxnreg"] = min(registers // 8 * 8, _MAX_REGISTERS)
    call: Any = jax_triton.triton_call  # its annotations leave out tuples of numbers
    return tuple(
        call(
            *arrays,
            numbers,
            kernel=kernel,
            out_type=list(outputs),
            grid=grid,
            compute_capability=capability,
            num_warps=num_warps,
            num_stages=num_stages,
            backend_options=options,
            input_output_aliases=dict(in_place or {}),
            cost_estimate=None if cost is None else dict(cost),
            **constants,
        )
    )


def row_descriptor(array: jax.Array, block: tuple[int, int]) -> jax_triton.TensorDescriptor:
    """A descriptor to load tiles of [rows, Hkv * D] by the tensor memory accelerator (sm_90+).

    Args:
        array: [..., Hkv, D], row-major; all leading axes count as rows.
        block: Rows and columns of a tile.

    Returns:
        The descriptor; tiles reaching past the last row are filled with zeros.
    """
    flat = array.reshape(-1, array.shape[-2] * array.shape[-1])
    return jax_triton.TensorDescriptor.from_array(flat, block)
