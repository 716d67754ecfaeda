"""Recomputes the log-probabilities of hypotheses the simple way."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_beam_attn.demo.errors import VerificationError
from jax_beam_attn.demo.hypotheses import Hypothesis
from jax_beam_attn.demo.model import LlamaConfig, LlamaParams, forward, unembed
from jax_beam_attn.demo.padding import pad_tokens

TOLERANCES = {"float32": 2e-3, "float16": 1e-2, "bfloat16": 6e-2}


def limit(num_tokens: int, dtype: str) -> float:
    """How far the log-probability of a hypothesis may be from the recomputed one.

    It is the dtype's tolerance times the square root of the number of tokens. The search rounds
    queries, keys and values to the dtype and the recomputation does not; the resulting errors of
    the tokens are about independent, so that their sum grows like a random walk. For eight prompts
    with 8 beams and 32 tokens, the largest differences were 5e-5 in f32, 1.4e-2 in fp16 and 9e-2
    in bf16: 0.5 %, 24 % and 27 % of the limit.
    """
    return TOLERANCES[dtype] * math.sqrt(num_tokens)


def recompute_log_probs(
    params: LlamaParams,
    prompt: Sequence[int],
    hypotheses: Sequence[Hypothesis],
    config: LlamaConfig,
) -> Iterator[float]:
    """The log-probability of each hypothesis by one full forward pass over prompt and hypothesis.

    No cache and no beam operator takes part, and everything but the stored weights is float32.
    One pass at a time, as the attention scores of long prompts take gigabytes.
    """
    longest = max(len(hypothesis.tokens) for hypothesis in hypotheses)
    sequences = [[*prompt, *hypothesis.tokens] for hypothesis in hypotheses]
    tokens, _ = pad_tokens(sequences, config.context_length)
    for row, hypothesis in zip(tokens, hypotheses, strict=True):
        log_probs = _next_token_log_probs(params, row, len(prompt), longest, config)
        yield float(jnp.sum(log_probs[: len(hypothesis.tokens)]))


@functools.partial(jax.jit, static_argnums=(3, 4))
def _next_token_log_probs(
    params: LlamaParams, tokens: jax.Array, start: ArrayLike, count: int, config: LlamaConfig
) -> jax.Array:
    """Log-probability f32 [count] of each of the tokens [S] from `start` on, given those before."""
    params = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    hidden = forward(params, tokens[None], config)[0]
    predicting = lax.dynamic_slice_in_dim(hidden, start - 1, count)
    predicted = lax.dynamic_slice_in_dim(tokens, start, count)
    log_probs = jax.nn.log_softmax(unembed(params, predicting))
    return jnp.take_along_axis(log_probs, predicted[:, None], axis=1)[:, 0]


def check(hypotheses: Sequence[Hypothesis], recomputed: Iterable[float], dtype: str) -> float:
    """Compares the search's log-probabilities with recomputed ones.

    Returns:
        The largest difference.

    Raises:
        VerificationError: A difference is past its limit, or no number.
    """
    largest = 0.0
    for rank, (hypothesis, log_prob) in enumerate(zip(hypotheses, recomputed, strict=True), 1):
        difference = abs(hypothesis.log_prob - log_prob)
        allowed = limit(len(hypothesis.tokens), dtype)
        if not difference <= allowed:
            raise VerificationError(
                f"hypothesis {rank} has log-probability {hypothesis.log_prob:.6f}, but a full "
                f"forward pass gives {log_prob:.6f}: they differ by {difference:.2g}, more than "
                f"the {allowed:.2g} that {dtype} allows for {len(hypothesis.tokens)} tokens"
            )
        largest = max(largest, difference)
    return largest
