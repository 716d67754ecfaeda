"""Constants and small functions of the Hopper kernel's device code."""

# The device code is CuTe-DSL, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

WARP = 32
WARPGROUP = 128
ROWS = 64  # queries of a consumer warpgroup
VECTOR = 8  # elements of 16 bits in the widest load
COLUMNS = 64  # of a swizzled row of shared memory: 128 bytes
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


@cute.jit
def vector_of(tensor, row, head_dim: cutlass.Constexpr, column):
    """8 columns of a row, `row` counting all leading axes together."""
    offset = cute.assume(Int64(row) * head_dim + column, divby=VECTOR)
    return cute.make_tensor(tensor.iterator + offset, cute.make_layout(VECTOR))


@cute.jit
def convert(scores, weights):
    """Weights in 16 bits; the accumulator of QK and operand A of PV have the same order."""
    weights.store(cute.make_tensor(scores.iterator, weights.layout).load().to(weights.element_type))


@cute.jit
def store_pair(tensor, offset, pair):
    """Stores two neighbouring float32 in the tensor's dtype."""
    to = cute.make_tensor(tensor.iterator + cute.assume(offset, divby=2), cute.make_layout(2))
    to.store(pair.load().to(tensor.element_type))


def of_block(address, block):
    """The address of another thread block's shared memory, in the cluster's window."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[Int32(address), Int32(block)],
    )


def load_remote(address, count):
    """1 or 2 float32 at such an address."""
    if count == 1:
        return [
            cute.arch.inline_ptx(
                "ld.shared::cluster.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[address],
            )
        ]
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address],
    )


def wait(barrier, phase):
    """Waits for a barrier's phase, always ready: `cute.arch.mbarrier_wait` sleeps between tries."""
    cute.arch.inline_ptx(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1};\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}",
        read_only_args=[barrier, Int32(phase)],
    )


def exp2(x):
    """2**x by the special function unit."""
    return cute.math.exp2(x, fastmath=True)


def float_of_bits(bits):
    """The float32 with these bits."""
    return Float32(cutlass._mlir.dialects.llvm.bitcast(Float32.mlir_type, bits.ir_value()))
