"""Recomputes the log-probabilities of hypotheses the simple way."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jax_beam_attn.demo.errors import VerificationError
from jax_beam_attn.demo.hypotheses import Hypothesis
from jax_beam_attn.demo.model import LlamaConfig, LlamaParams, forward, unembed
from jax_beam_attn.demo.padding import pad_tokens

# How far the log-probability of a whole hypothesis may be from the recomputed one. In fp16 and bf16
# the search rounds queries, keys and values and the recomputation does not, so that long hypotheses
# of some prompts are past the limit: of eight prompts with 8 beams and 32 tokens, two in fp16 (the
# largest difference was 1.4e-2) and two in bf16 (9e-2). In f32 it was 5e-5.
TOLERANCES = {"float32": 2e-3, "float16": 1e-2, "bfloat16": 6e-2}


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
        allowed = TOLERANCES[dtype]
        if not difference <= allowed:
            raise VerificationError(
                f"hypothesis {rank} has log-probability {hypothesis.log_prob:.6f}, but a full "
                f"forward pass gives {log_prob:.6f}: they differ by {difference:.2g}, more than "
                f"the {allowed:.2g} that {dtype} allows"
            )
        largest = max(largest, difference)
    return largest
