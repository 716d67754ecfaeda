"""Reads hypotheses out of the arrays of a beam search."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jax_beam_attn.demo.beam_search import History, SearchResult


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One finished continuation of the prompt.

    Attributes:
        tokens: The new tokens, with the EOS if there is one.
        log_prob: Their log-probability given the prompt.
        score: `log_prob`, divided as the length penalty says.
        path: The beam of each step that the hypothesis was; its EOS, which is in no beam, has none.
    """

    tokens: tuple[int, ...]
    log_prob: float
    score: float
    path: tuple[int, ...]


def read_hypotheses(result: SearchResult, sample: int, eos_token: int) -> list[Hypothesis]:
    """The hypotheses of one sample of the batch, best first."""
    result = jax.device_get(result)
    finished = [field[sample] for field in result.finished]
    hypotheses = []
    for score, log_prob, row, eos in zip(*finished, strict=True):
        if np.isneginf(score):
            continue
        path = _trace_back(result.history, sample, int(row))
        tokens = [int(result.history.tokens[sample, step, beam]) for step, beam in enumerate(path)]
        tokens += [eos_token] if eos else []
        hypotheses.append(Hypothesis(tuple(tokens), float(log_prob), float(score), path))
    return hypotheses


def _trace_back(history: History, sample: int, row: int) -> tuple[int, ...]:
    """The beams from the first step to the one of `row`; -1 is the prompt."""
    if row < 0:
        return ()
    step, beam = divmod(row, history.tokens.shape[2])
    path = [beam]
    for later_step in range(step, 0, -1):
        path.append(int(history.parents[sample, later_step, path[-1]]))
    return tuple(reversed(path))
