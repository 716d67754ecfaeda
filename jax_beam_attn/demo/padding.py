"""Pads token sequences to few common lengths, so that one executable serves many prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_SHORTEST = 64


def pad_tokens(
    sequences: Sequence[Sequence[int]], context_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Pads sequences at the end to the next power of two of the longest.

    Args:
        sequences: B sequences of at most `context_length` tokens.
        context_length: The longest sequence that the model can take.

    Returns:
        Tokens, int32 [B, S], and lengths, int32 [B].
    """
    longest = max(len(sequence) for sequence in sequences)
    padded_length = _SHORTEST
    while padded_length < longest:
        padded_length *= 2
    tokens = np.zeros((len(sequences), min(padded_length, context_length)), np.int32)
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, np.array([len(sequence) for sequence in sequences], np.int32)
