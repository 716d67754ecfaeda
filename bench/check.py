"""Correctness of a measured call."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def relative_error(out: jax.Array, reference: jax.Array) -> float:
    """Relative Frobenius error, ||out - reference|| / ||reference||.

    NaN if `out` holds one, so compare with `error <= tolerance`, which NaN fails.

    Raises:
        ValueError: If the shapes differ, or the reference has no finite norm above 0.
    """
    if out.shape != reference.shape:
        raise ValueError(f"out: got shape {out.shape}, the reference has {reference.shape}")
    expected = reference.astype(jnp.float32)
    norm = float(jnp.linalg.norm(expected.ravel()))
    if not 0.0 < norm < float("inf"):
        raise ValueError(f"reference: got norm {norm}, expected a finite one above 0")
    return float(jnp.linalg.norm((out.astype(jnp.float32) - expected).ravel())) / norm
