"""Operators whose kernels are native handlers, for CPUs alone or for GPUs too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jax_beam_attn._core import native

NATIVE = "native"
_SMALLEST_CAPABILITY = 80  # csrc/CMakeLists.txt compiles machine code from there on


@dataclasses.dataclass(frozen=True)
class Handler:
    """A handler of csrc that serves every call of an operator.

    Attributes:
        name: Of its symbol and FFI target, the same in all parts that have it (`native.HANDLERS`).
        run: `(operands, static)` to the tuple of outputs, by `jax.ffi.ffi_call`.
    """

    name: str
    run: Callable[[dict[str, Any], Any], tuple[jax.Array, ...]]

    def unavailable(self, part: native.Part) -> str | None:
        """None where the handler can be called, and then it is registered; else the reason."""
        state = native.register(self.name, part)
        return None if state.available else state.reason

    def unavailable_on_gpu(self, capability: int) -> str | None:
        """The same for a GPU of a compute capability."""
        if "cuda" not in native.HANDLERS[self.name]:
            return "the native code is for CPUs"
        if capability < _SMALLEST_CAPABILITY:
            return f"native code needs sm_{_SMALLEST_CAPABILITY} or later"
        return self.unavailable("cuda")
