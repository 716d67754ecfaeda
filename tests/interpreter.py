"""Runs Triton kernels on the CPU with NumPy arrays, through Triton's interpreter.

Triton decides at import whether it interprets, so this works only in a process that was started
with TRITON_INTERPRET=1. The interpreter expects PyTorch tensors; `_Tensor` offers the few methods
of one that it calls. It takes the bits of bf16 for integers in dots and conversions, or cuts where
a GPU rounds; `_dot` and `_cast` are put in their place. Inline assembly it has none: `_inline_asm`
executes what has one element of 16 bits in each register, and plain moves.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from tests import ptx


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    products = np.matmul(_numbers(a), _numbers(b), dtype=d.data.dtype)
    return interpreter.TensorHandle(products + d.data, d.dtype.scalar)


def _numbers(handle) -> np.ndarray:
    """The numbers of a handle; bf16 lies in it as the upper halves of float32."""
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def _cast(self, src, dst_type):
    numbers = _numbers(src)
    if dst_type.scalar == tl.bfloat16:
        data = numbers.astype(ml_dtypes.bfloat16).view(np.uint16)
    else:
        data = numbers.astype(interpreter._get_np_dtype(dst_type))
    return interpreter.TensorHandle(data, dst_type.scalar)


def _inline_asm(self, assembly, constraints, arguments, types, is_pure, pack):
    if assembly == "mov.b32 $0, $1;":
        return _Results(arguments)
    assert pack == 1
    inputs = {len(types) + n: argument.data for n, argument in enumerate(arguments)}
    results = ptx.execute(assembly, inputs)
    return _Results(
        interpreter.TensorHandle(
            results[n].astype(np.uint16).view(interpreter._get_np_dtype(each)), each.scalar
        )
        for n, each in enumerate(types)
    )


class _Results(list):
    get_result = list.__getitem__


interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.create_inline_asm = _inline_asm
interpreter.InterpreterBuilder.cast_impl = _cast


class _Dtype(str):
    """A PyTorch dtype's name that also knows its size."""

    itemsize: int


class _Tensor:
    """A NumPy array in the clothes of a CPU PyTorch tensor."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = _Dtype(f"torch.{array.dtype.name}")
        self.dtype.itemsize = array.itemsize
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return _Tensor(self.array)

    def set_(self, *_):
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return tuple(stride // self.array.itemsize for stride in self.array.strides)

    def copy_(self, _):
        return self


def triton_call(kernel, arrays, numbers, outputs, *, grid, in_place=None, **options):
    """Stands in for `jax_beam_attn._core.triton_call.triton_call` on concrete arrays."""
    launch_only = ("target", "cost", "num_warps", "num_stages", "blocks_per_sm")
    constants = {name: value for name, value in options.items() if name not in launch_only}
    # Outputs start as NaN, so that an element that no program writes shows.
    results = [
        np.full(each.shape, np.nan if np.issubdtype(each.dtype, np.inexact) else 77, each.dtype)
        for each in outputs
    ]
    in_place = in_place or {}
    arguments = [_argument(array) for array in arrays]
    for source, result in in_place.items():
        results[result][...] = arrays[source]
        arguments[source] = _Tensor(results[result])
    others = [_Tensor(x) for n, x in enumerate(results) if n not in in_place.values()]
    kernel[grid](*arguments, numbers, *others, **constants)
    return results


def _argument(array):
    if array is None:
        return None
    if hasattr(array, "block_shape"):
        base = _Tensor(np.ascontiguousarray(array.base))
        return TensorDescriptor(base, list(array.shape), list(array.strides), array.block_shape)
    return _Tensor(np.ascontiguousarray(array))
