"""Why a kernel compiler cannot be used in this installation."""

from __future__ import annotations

import functools
import importlib.util


def missing_triton() -> str | None:
    """None where Triton kernels can be compiled, else the reason."""
    return _missing("jax_triton", "triton")


def missing_cute() -> str | None:
    """None where CuTe-DSL kernels can be compiled, else the reason."""
    return _missing("cutlass")


@functools.cache
def _missing(*modules: str) -> str | None:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} not installed: pip install 'jax-beam-attn[gpu]'"
