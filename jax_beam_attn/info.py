"""`python -m jax_beam_attn info`: what this machine can run, and why not more."""

from __future__ import annotations

import importlib.metadata
import sys

import jax

from jax_beam_attn._core import native
from jax_beam_attn._core.handler import NATIVE
from jax_beam_attn._core.operator import REFERENCE, Implementation, Operator
from jax_beam_attn._core.target import device_target
from jax_beam_attn.beam_decode.op import beam_decode
from jax_beam_attn.sparse_mla.cache import append
from jax_beam_attn.sparse_mla.op import sparse_mla
from jax_beam_attn.sparse_mla.schedule import schedule
from jax_beam_attn.turboquant.cache import store
from jax_beam_attn.turboquant.op import turboquant

_PACKAGES = (
    "jax-beam-attn",
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
    "nvidia-cutlass-dsl",
)
_OPERATORS = (beam_decode, sparse_mla, schedule, append, turboquant, store)


def main() -> None:
    """Prints versions, devices, native parts and the implementations of each operator."""
    print("\n".join(report()))


def report() -> list[str]:
    """The lines that `main` prints."""
    devices = jax.devices()
    gpus = [device for device in devices if device.platform == "gpu"]
    kinds = sorted({(device.platform, device.device_kind) for device in devices})
    lines = ["Versions", f"  python {sys.version.split()[0]}"]
    lines += [f"  {name} {_version(name)}" for name in _PACKAGES]
    lines += ["", "Devices"]
    for platform, kind in kinds:
        count = sum((d.platform, d.device_kind) == (platform, kind) for d in devices)
        lines.append(f"  {count} x {platform}: {kind}")
    lines += ["", "Native code"]
    for part, status in native.status().items():
        lines.append(f"  {part}: {'available' if status.available else status.reason}")
    for operator in _OPERATORS:
        lines += ["", operator.name]
        for each in operator.implementations:
            lines.append(f"  {each.name}: {_unavailable(operator, each, gpus) or 'available'}")
        lines.append(f"  {REFERENCE}: available")
    return lines


def _unavailable(operator: Operator, implementation: Implementation, gpus: list) -> str | None:
    if gpus:
        return implementation.unavailable(device_target(gpus[0]))
    if operator.handler is not None and implementation.name == NATIVE:
        return operator.handler.unavailable("cpu")
    return "no CUDA GPU here"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
