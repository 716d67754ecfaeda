"""The online softmax of all Triton kernels.

Scores are compared as they are; `to_log2` > 0 turns one into the exponent of 2 in its weight.
"""

# The device code is Triton's language, which type checkers take for Python.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def load_scale(scale):
    """The magnitude of a traced softmax scale, next to nothing for 0, and its sign for the scores.

    Not for the queries: where these are changed in registers, they stay there as an operand of
    wgmma, and under pressure ptxas (12.9, 13.0) gives their registers away inside the loop.
    """
    number = tl.load(scale)
    return tl.maximum(tl.abs(number), 1e-30), tl.where(number < 0.0, -1.0, 1.0)


@triton.jit
def soft_cap(score, to_cap, SOFT_CAP: tl.constexpr):
    """tanh(score * to_cap) where asked, the logit in units of the cap; else the score."""
    if SOFT_CAP:
        x = to_cap * score
        # The difference loses small values, which matter where the cap is large.
        square = x * x
        series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0)))
        return tl.where(square < 0.01, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)
    return score


@triton.jit
def advance(peak, largest, to_log2):
    """Takes more scores into account, the largest of which is `largest`.

    Returns:
        The new peak; the base, with which a score weighs exp2(score * to_log2 - base); the factor
        of what was summed up before.
    """
    new_peak = tl.maximum(peak, largest)
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    # While the peak stays, the difference is 0 and the factor is 1. Compilers fuse
    # peak * to_log2 - base, which leaves what was rounded off the base, in each tile anew.
    return new_peak, finite * to_log2, tl.exp2((peak - finite) * to_log2)


@triton.jit
def normalize(peak, total, sink, sink_at, valid):
    """What accumulated values are to be multiplied by, and the LSE, for all kernels.

    Args:
        peak: The largest logits of the rows, natural logarithm, of any value where empty.
        total: The sums of exp(logit - peak), 0 where there is nothing to attend to.
        sink: Pointer to f32 sinks, or None; each counts once, in the norm but not in the LSE.
        sink_at: Offsets of the rows' sinks.
        valid: Whether there is such a row.
    """
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    log_total = tl.where(empty, float("-inf"), peak + tl.log(total))
    norm = 1.0 / total
    if sink is not None:
        of_sink = tl.load(sink + sink_at, mask=valid, other=0.0)
        norm = tl.where(empty, 0.0, norm / (1.0 + tl.exp(of_sink - log_total)))
    return norm, log_total
