"""What a compiled program does to a large buffer."""

from __future__ import annotations

import math
import re

_BYTES = {"pred": 1, "u8": 1, "s8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4}
# The name and dimensions of an array, and what computes it.
_INSTRUCTION = re.compile(r"= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
# These make no new array, or write into the one they are given.
_NO_COPY = {"parameter", "bitcast", "get-tuple-element", "scatter", "dynamic-update-slice"}


def copies_of_size(compiled, size: int) -> list[str]:
    """Instructions of a compiled program whose result is a new array of at least so many bytes.

    A fusion writes in place what is a scatter or a dynamic-update-slice inside it; any other
    large result inside a fusion is found there, for instance that of a fused copy.
    """
    found = []
    for line in compiled.as_text().splitlines():
        match = _INSTRUCTION.search(line)
        if not match or match[1] not in _BYTES or match[3] in (*_NO_COPY, "fusion", "call"):
            continue
        if match[3] == "custom-call" and "output_to_operand_aliasing" in line:
            continue
        count = math.prod(int(n) for n in match[2].split(",") if n)
        if count * _BYTES[match[1]] >= size:
            found.append(line.strip())
    return found
