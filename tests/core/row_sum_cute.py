"""The tiny operator's CuTe kernel: one block a row, reduced through shared memory."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils

_THREADS = 128


@cute.kernel
def _row_sum(x: cute.Tensor, length: cute.Tensor, out: cute.Tensor, factor: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    end = cutlass.min(length[row], cute.size(x, mode=[1]))
    partial = cutlass.Float32(0.0)
    for column in range(thread, end, _THREADS):
        partial += x[row, column]
    shared = cutlass.memory.SmemAllocator().allocate_tensor(
        cutlass.Float32, cute.make_layout(_THREADS)
    )
    shared[thread] = partial
    cute.arch.sync_threads()
    if thread == 0:
        total = cutlass.Float32(0.0)
        for i in range(_THREADS):
            total += shared[i]
        out[row] = total * factor


@cute.jit
def launch_row_sum(
    stream: cuda.CUstream,
    x: cute.Tensor,
    length: cute.Tensor,
    out: cute.Tensor,
    factor: cutlass.Constexpr,
):
    _row_sum(x, length, out, factor).launch(
        grid=[cute.size(x, mode=[0]), 1, 1], block=[_THREADS, 1, 1], stream=stream
    )
