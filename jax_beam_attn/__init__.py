"""Decode attention for JAX on NVIDIA GPUs."""

from jax_beam_attn._core.export import export_disabled_checks, register_native_handlers
from jax_beam_attn._core.merge import merge_splits
from jax_beam_attn._core.splits import num_splits_heuristic
from jax_beam_attn._core.target import GpuTarget, gpu_target
from jax_beam_attn.beam_decode.api import beam_decode_attn
from jax_beam_attn.beam_decode.plan import BeamDecodePlan
from jax_beam_attn.sparse_mla.api import sparse_mla_decode
from jax_beam_attn.sparse_mla.cache import append_mla_cache, pack_mla_cache, unpack_mla_cache
from jax_beam_attn.sparse_mla.plan import SparseMlaPlan
from jax_beam_attn.sparse_mla.schedule import MlaSchedule, mla_schedule
from jax_beam_attn.turboquant.api import turboquant_attention, turboquant_decode_attention
from jax_beam_attn.turboquant.cache import (
    TurboQuantFormat,
    turboquant_dequantize,
    turboquant_store,
)
from jax_beam_attn.turboquant.codebook import hadamard_rotation, lloyd_max_centroids
from jax_beam_attn.turboquant.plan import TurboQuantPlan

__version__ = "0.1.0"

__all__ = [
    "BeamDecodePlan",
    "GpuTarget",
    "MlaSchedule",
    "SparseMlaPlan",
    "TurboQuantFormat",
    "TurboQuantPlan",
    "append_mla_cache",
    "beam_decode_attn",
    "export_disabled_checks",
    "gpu_target",
    "hadamard_rotation",
    "lloyd_max_centroids",
    "merge_splits",
    "mla_schedule",
    "num_splits_heuristic",
    "pack_mla_cache",
    "register_native_handlers",
    "sparse_mla_decode",
    "turboquant_attention",
    "turboquant_decode_attention",
    "turboquant_dequantize",
    "turboquant_store",
    "unpack_mla_cache",
]
