"""How far a result may be from the float64 oracle: one table for all operators.

Outputs are compared row by row (one row: the D numbers of one query head), by the norm of the
difference relative to the norm of the expected row. That is stricter than the Frobenius error of
the whole array, in which one wrong row can hide. LSE is compared by absolute error. NaN fails.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Limits for one dtype of the query.

    Attributes:
        out: Relative error of an output row.
        out_floor: Absolute error of an output element that always passes: what is smaller is
            flushed to zero or rounded to the dtype's subnormal grid.
        lse: Absolute error of the LSE.
    """

    out: float
    out_floor: float
    lse: float


# LSE is float32 for every dtype: products of bf16 and fp16 numbers are exact in float32, so what
# is left is float32's rounding (6e-8 relative) in sums of at most a few thousand terms and in
# exp and log, times the size of the logits (tens).
_LSE = 1e-5

# What a sink takes almost everything from: its share of less than 2**-126 is flushed to zero, and
# with it a value of at most a few tens.
_SUBNORMAL = 2.0**-120

TOLERANCES = {
    # Float32 rounding of sums of a few thousand terms, and some cancellation between values.
    jnp.dtype(jnp.float32): Tolerance(out=1e-5, out_floor=_SUBNORMAL, lse=_LSE),
    # The output is rounded once, by at most half a step of 2**-7: 2**-8 of its size in the worst
    # case. Float32's error is far below that.
    jnp.dtype(jnp.bfloat16): Tolerance(out=2.0**-8, out_floor=_SUBNORMAL, lse=_LSE),
    # Likewise with steps of 2**-10; fp16 alone has subnormals in sight, in steps of 2**-24.
    jnp.dtype(jnp.float16): Tolerance(out=2.0**-11 + 1e-5, out_floor=2.0**-24, lse=_LSE),
}

# The same float32 mathematics summed in another order (vmap or a loop, split or one pass).
REORDERED = Tolerance(out=5e-6, out_floor=_SUBNORMAL, lse=5e-6)

# Rounding of a logit relative to its size: one float32 step for each of scale, products and sum.
LARGE_LOGIT_ROUNDING = 2.0**-20
# On tensor cores, which add 16 products at a time, up to D / 16 = 16 times, and cut each sum off.
LARGE_LOGIT_ROUNDING_GPU = 16 * 2.0**-23


def assert_out_close(got, want, tolerance: Tolerance) -> None:
    """Requires every row (last axis) of `got` to be within tolerance of `want`."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.isfinite(got).all(), "output is not finite"
    if not want.size:
        return
    error = np.linalg.norm(got - want, axis=-1)
    floor = tolerance.out_floor * np.sqrt(want.shape[-1])
    limit = np.maximum(tolerance.out * np.linalg.norm(want, axis=-1), floor)
    worst = np.unravel_index(np.argmax(error / limit), error.shape)
    assert error[worst] <= limit[worst], (
        f"row {tuple(map(int, worst))}: error {error[worst]:.3g}, allowed {limit[worst]:.3g}\n"
        f"got  {got[worst]}\nwant {want[worst]}"
    )


def assert_lse_close(got, want, tolerance: Tolerance) -> None:
    """Requires the same rows to be empty (-inf) and the others to be within tolerance."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want), "empty rows (LSE -inf)")
    full = ~np.isneginf(want)
    assert np.isfinite(got[full]).all(), "LSE is not finite"
    np.testing.assert_allclose(got[full], want[full], rtol=0, atol=tolerance.lse)


def relative_frobenius(got, want) -> float:
    """||got - want|| / ||want|| of whole arrays, NaN where either has one."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / (size if size else 1.0))


# A value found by hand against a few float32 operations, relative and absolute.
FEW_OPERATIONS = 1e-6

# Float32 sums of a handful of normal numbers; on the GPU of a thousand, in another order.
ROW_SUM = {"rtol": 1e-5, "atol": 1e-6}
ROW_SUM_GPU = {"rtol": 1e-4, "atol": 1e-4}

# Log-probabilities of hypotheses of about ten tokens, float32 against float32 by another way: of a
# model of two small layers, and of one of thirty.
LOG_PROB_TINY = 1e-4
LOG_PROB_SMOLLM2 = 1e-3

# Half a step of e4m3 (three mantissa bits) is 2**-4 of a number in the worst case.
E4M3_ROUNDING = 2.0**-4
# What is multiplied by a subnormal scale may lose all of it: CPUs flush subnormals to zero.
SMALLEST_NORMAL = 2.0**-126

# Kernels against the float32 reference on the same inputs: relative Frobenius error of the output
# and absolute error of the LSE. Weights are rounded to the query's dtype before they meet V.
KERNEL_OUT = {
    jnp.dtype(jnp.float32): 1e-5,
    jnp.dtype(jnp.bfloat16): 4e-3,
    jnp.dtype(jnp.float16): 5e-4,
}
KERNEL_LSE = 1e-3


# Sparse MLA decode against the float64 oracle. Its inputs are dequantised exactly, its output is
# bf16; kernels round weights, and a scaled key, to bf16 too. An element of a sum of a hundred such
# products may be off by two bf16 steps (2 * 2**-7 of its size; 2.01 for float32's part in it), one
# that cancels to nearly nothing by 1e-3 of the keys' size 1. The cosine holds them together: single
# elements may be off, all of them in one direction may not. FlashMLA's tests have the same limits.
MLA_OUT_ABSOLUTE = 1e-3
MLA_OUT_RELATIVE = 2.01 / 128
MLA_OUT_COSINE = 5e-6
# The LSE knows no bf16 but the query's and, in kernels, that of a scaled key: exact if the scale is
# a power of two. Then float32's rounding is all there is; see API.md for other scales.
MLA = Tolerance(out=MLA_OUT_RELATIVE, out_floor=MLA_OUT_ABSOLUTE, lse=_LSE)
MLA_ROUNDED_KEYS = dataclasses.replace(MLA, lse=1e-2)


def assert_mla_out_close(got, want) -> None:
    """Requires every element to be near and the whole to point in the same direction."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape
    assert np.isfinite(got).all(), "output is not finite"
    error = np.abs(got - want)
    limit = np.maximum(MLA_OUT_ABSOLUTE, MLA_OUT_RELATIVE * np.abs(want))
    if (error > limit).any():
        worst = np.unravel_index(np.argmax(error / limit), error.shape)
        raise AssertionError(
            f"{(error > limit).sum()} of {error.size} elements; {tuple(map(int, worst))}: "
            f"got {got[worst]:.6g}, want {want[worst]:.6g}"
        )
    # What is flushed to zero, up to 2**-126 of each element, says nothing of the direction.
    flushed = max(got.size, 1) * 2.0**-252
    size = max((got**2 + want**2).sum(), flushed / MLA_OUT_COSINE)
    cosine = ((got - want) ** 2).sum() / size  # 1 - 2 (got . want) / size
    assert cosine <= MLA_OUT_COSINE, f"cosine difference {cosine:.3g}"


# Half a step of fp16 (ten mantissa bits), and float32's part in what is rounded to it.
F16_ROUNDING = 2.0**-11 + 1e-6
# How near to the border of two codes float32 may take the other one: relative to the largest
# centroid, which a rotated coordinate's rounding is a few float32 steps of, or in steps of a value.
TURBOQUANT_MIDPOINT = 1e-5
# How many codes of normal keys that may be; and a norm, corrected for one such code of 128.
TURBOQUANT_CODES = 1e-4
TURBOQUANT_NORM = 2.0**-9

# TurboQuant kernels against the float32 reference on the same cache: relative Frobenius error.
# An output in bf16 is off by 1.6e-3 (root mean square of rounding to 2**-8). In float32, means of
# 8192 values are a 50th of the values in size, of which sums are off by a few steps.
TURBOQUANT_OUT = {
    jnp.dtype(jnp.float32): 3e-5,
    jnp.dtype(jnp.bfloat16): 3e-3,
    jnp.dtype(jnp.float16): 3e-3,
}
# Queries and centroids are rounded to fp16, by up to 2**-11 each. A logit's D products, whose
# squares sum to about 1, may be off by 4e-4 together; this is a few times that, for many rows.
TURBOQUANT_LSE = 3e-3
