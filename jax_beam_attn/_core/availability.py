"""Why a kernel compiler cannot be used, in this installation or for a GPU."""

from __future__ import annotations

import functools
import importlib.util

from jax_beam_attn._core.target import GpuTarget


def triton_unavailable(target: GpuTarget) -> str | None:
    """None where Triton kernels can be compiled for the target, else the reason."""
    if target.compute_capability < 80:
        return f"Triton kernels need sm_80 or later, the GPU is {target.arch}"
    return _missing("jax_triton", "triton")


def cute_unavailable(target: GpuTarget, capabilities: tuple[int, ...] = (90,)) -> str | None:
    """None where CuTe-DSL kernels written for `capabilities` can be compiled for the target."""
    if target.compute_capability not in capabilities:
        wanted = " or ".join(f"sm_{capability}a" for capability in capabilities)
        return f"the CuTe kernel is for {wanted}, the GPU is {target.arch}"
    return _missing("cutlass")


@functools.cache
def _missing(*modules: str) -> str | None:
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{' and '.join(absent)} not installed: pip install 'jax-beam-attn[gpu]'"
