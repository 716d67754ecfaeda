"""The GPU a program is compiled for: what plans and kernels need to know of it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from jax_beam_attn._core import jax_compat


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU as the planner sees it.

    Attributes:
        name: Marketing name, for messages and tables.
        compute_capability: Major times ten plus minor, e.g. 90 for Hopper.
        num_sms: Streaming multiprocessors.
        l2_bytes: Size of the L2 cache in bytes.
    """

    name: str
    compute_capability: int
    num_sms: int
    l2_bytes: int

    @property
    def arch(self) -> str:
        """The compiler's name, with the `a` that enables wgmma and its successors."""
        suffix = "a" if self.compute_capability in (90, 100, 103) else ""
        return f"sm_{self.compute_capability}{suffix}"

    @property
    def block_shared_bytes(self) -> int:
        """The most shared memory that one thread block can have."""
        kib = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
        return kib.get(self.compute_capability, 99) * 1024


_MIB = 2**20

# The H200's sizes were read off one; the others are those that NVIDIA publishes. Keys are matched
# against JAX's `device_kind`, longest first, so that none is taken for a part of a longer one.
TARGETS = {
    "a100": GpuTarget("A100", 80, 108, 40 * _MIB),
    "l40s": GpuTarget("L40S", 89, 142, 96 * _MIB),
    "rtx 4090": GpuTarget("RTX 4090", 89, 128, 72 * _MIB),
    "h100": GpuTarget("H100", 90, 132, 50 * _MIB),
    "h200": GpuTarget("H200", 90, 132, 60 * _MIB),
    "b200": GpuTarget("B200", 100, 148, 126 * _MIB),
    "rtx 5090": GpuTarget("RTX 5090", 120, 170, 96 * _MIB),
}

# `jax.make_user_context` makes the value part of jit's cache key, so that tracing the same
# function under two targets gives two programs.
_given_target = jax.make_user_context(default_value=None)


def gpu_target(target: str | GpuTarget) -> contextlib.AbstractContextManager[None]:
    """Compiles for the given GPU on a host that has none.

    Exporting a program for CUDA needs to know for which GPU its kernels are. With a GPU present
    that is the GPU itself; without one, operators lower to their reference unless a target is
    given here.

    Args:
        target: A name such as `"h200"`, `"a100"` or `"b200"`, or a `GpuTarget`.

    Returns:
        A context manager; tracing inside it uses the target.

    Raises:
        ValueError: For an unknown name.

    Example:
        >>> import jax, jax_beam_attn
        >>> with jax_beam_attn.gpu_target("h200"):
        ...     exported = jax.export.export(jax.jit(lambda x: x + 1), platforms=["cuda"])(1.0)
        >>> exported.platforms
        ('cuda',)
    """
    if isinstance(target, str):
        if target.lower() not in TARGETS:
            raise ValueError(f"target: got {target!r}, expected one of {sorted(TARGETS)}")
        target = TARGETS[target.lower()]
    if not isinstance(target, GpuTarget):
        raise TypeError(f"target: got {type(target).__name__}, expected a name or GpuTarget")
    return _given_target(target)


def given_target() -> GpuTarget | None:
    """The target of the innermost `gpu_target` around the current trace."""
    return _given_target.value


def device_target(device: Any) -> GpuTarget:
    """The target that describes a CUDA device, known to the table or not."""
    kind = device.device_kind.lower()
    major, minor = device.compute_capability.split(".")
    capability = 10 * int(major) + int(minor)
    for name in sorted(TARGETS, key=len, reverse=True):
        if name in kind and TARGETS[name].compute_capability == capability:
            return dataclasses.replace(TARGETS[name], num_sms=device.core_count)
    # An unknown GPU gets the L2 size of the smallest known one of its generation.
    peers = [t for t in TARGETS.values() if t.compute_capability // 10 == int(major)]
    l2_bytes = min((t.l2_bytes for t in peers), default=40 * _MIB)
    return GpuTarget(device.device_kind, capability, device.core_count, l2_bytes)


def lowering_target(ctx) -> GpuTarget | None:
    """The GPU of the lowering context, or None when it is for one that is not here."""
    devices = [d for d in jax_compat.lowering_devices(ctx) if d.platform in ("gpu", "cuda")]
    if not devices:
        try:
            devices = jax.devices("cuda")
        except RuntimeError:  # no CUDA backend in this process
            return None
    return device_target(devices[0])
