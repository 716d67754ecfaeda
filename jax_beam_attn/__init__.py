"""Decode attention for JAX on NVIDIA GPUs."""

from jax_beam_attn._core.export import export_disabled_checks
from jax_beam_attn._core.merge import merge_splits
from jax_beam_attn._core.splits import num_splits_heuristic
from jax_beam_attn._core.target import GpuTarget, gpu_target
from jax_beam_attn.beam_decode.api import beam_decode_attn
from jax_beam_attn.beam_decode.plan import BeamDecodePlan

__version__ = "0.1.0"

__all__ = [
    "BeamDecodePlan",
    "GpuTarget",
    "beam_decode_attn",
    "export_disabled_checks",
    "gpu_target",
    "merge_splits",
    "num_splits_heuristic",
]
