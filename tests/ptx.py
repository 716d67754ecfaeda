"""Executes the few PTX instructions of inline assembly on NumPy words, as the PTX ISA says."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np


def execute(assembly: str, inputs: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The operands `$n` that a piece of inline assembly writes: words, or halves by `mov {,}`."""
    registers = {f"${n}": np.asarray(x, np.uint32) for n, x in inputs.items()}
    text = re.sub(r"//.*", "", assembly).strip().strip("{}")
    for instruction in re.findall(r"[^;]+;", text):
        name, operands = instruction.strip().rstrip(";").split(None, 1)
        if name == ".reg":
            continue
        if destination := re.match(r"\{(\S+), (\S+)\}, (\S+)", operands):
            word = registers[destination[3]]
            registers[destination[1]], registers[destination[2]] = word & 0xFFFF, word >> 16
            continue
        destination, *sources = (operand.strip() for operand in operands.split(","))
        values = [registers[s] if s in registers else np.uint32(int(s, 0)) for s in sources]
        registers[destination] = _OPERATIONS[name](*values)
    return {
        int(name[1:]): value
        for name, value in registers.items()
        if name[0] == "$" and int(name[1:]) not in inputs
    }


def _prmt(a, b, selector):
    selector = np.asarray(selector, np.uint32)
    bytes_of = [(word >> (8 * n)) & 0xFF for word in (a, b) for n in range(4)]
    result = np.uint32(0)
    for n in range(4):
        nibble = (selector >> (4 * n)) & 0xF
        byte = np.choose(nibble & 7, np.broadcast_arrays(*bytes_of, selector)[:8])
        sign = np.where(byte >> 7, np.uint32(0xFF), np.uint32(0))
        result = result | (np.where(nibble >> 3, sign, byte).astype(np.uint32) << np.uint32(8 * n))
    return result


def _lop3(a, b, c, table):
    result = np.uint32(0)
    for n in range(8):
        if int(table) >> n & 1:
            term = [x if n >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
            result = result | (term[0] & term[1] & term[2])
    return result


def _fma_bf16x2(a, b, c):
    halves = []
    for shift in (0, 16):
        x, y, z = (
            (np.asarray(word >> shift) & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16)
            for word in (a, b, c)
        )
        exact = x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64)
        halves.append(exact.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32))
    return halves[0] | (halves[1] << np.uint32(16))


_OPERATIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: (a.astype(np.uint64) * int(b)).astype(np.uint32),
    "bfe.u32": lambda a, start, count: (a >> start) & np.uint32((1 << int(count)) - 1),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _fma_bf16x2,
}
