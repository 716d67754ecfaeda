"""Two ways to search: the demo's, and by brute force with its own bookkeeping.

The brute force re-runs the whole prefix of every hypothesis through the plain forward pass, keeps
hypotheses as Python tuples and adds log-probabilities in float64.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np

from jax_beam_attn.demo.beam_search import beam_search, prefill
from jax_beam_attn.demo.hypotheses import read_hypotheses
from jax_beam_attn.demo.model import forward, unembed
from jax_beam_attn.demo.padding import pad_tokens
from tests.tolerances import LOG_PROB_TINY

NO_EOS = -1


class Found(NamedTuple):
    tokens: tuple[int, ...]
    log_prob: float
    score: float


def search(params, config, prompts, num_beams, num_tokens, eos=NO_EOS, penalty=1.0):
    """The result of the demo's beam search over a batch of prompts."""
    tokens, lengths = pad_tokens(prompts, config.context_length)
    context = prefill(params, tokens, lengths, config=config)
    sizes = {"num_beams": num_beams, "max_new_tokens": num_tokens}
    return beam_search(params, context, eos, penalty, config=config, **sizes)


def found_by(result, eos=NO_EOS, sample=0) -> list[Found]:
    hypotheses = read_hypotheses(result, sample, eos)
    return [Found(each.tokens, each.log_prob, each.score) for each in hypotheses]


@functools.partial(jax.jit, static_argnames="config")
def _next_log_probs(params, tokens, lengths, config):
    hidden = forward(params, tokens, config)
    last = jax.vmap(lambda states, length: states[length - 1])(hidden, lengths)
    return jax.nn.log_softmax(unembed(params, last))


def next_log_probs(params, config, sequences, batch) -> np.ndarray:
    """f64 [len(sequences), vocab], by full forward passes of `batch` sequences."""
    lengths = np.array([len(sequence) for sequence in sequences])
    tokens = np.zeros((batch, 32 * -(-lengths.max() // 32)), np.int32)  # few lengths to compile
    for row, sequence in zip(tokens, sequences, strict=False):
        row[: len(sequence)] = sequence
    lengths = np.pad(lengths, (0, batch - len(sequences)), constant_values=1)
    log_probs = _next_log_probs(params, tokens, lengths, config=config)
    return np.asarray(log_probs, np.float64)[: len(sequences)]


def brute_force_search(
    params, config, prompt, num_beams, num_tokens, eos=NO_EOS, penalty=1.0
) -> tuple[list[Found], int]:
    """What beam search should find, best first, and the steps that it takes."""
    live, finished, steps = [((), 0.0)], [], 0

    def found(tokens, log_prob):
        return Found(tokens, log_prob, log_prob / len(tokens) ** penalty)

    def best(hypotheses):
        return sorted(hypotheses, key=lambda each: -each.score)[:num_beams]

    while live and steps < num_tokens:
        steps += 1
        prefixes = [[*prompt, *tokens] for tokens, _ in live]
        table = next_log_probs(params, config, prefixes, num_beams)
        table += np.array([log_prob for _, log_prob in live])[:, None]
        # Nothing past the 2W best matters: W hypotheses can end in EOS in only W ways.
        order = np.argsort(-table, axis=None)[: 2 * num_beams]
        ranked = [
            ((*live[beam][0], int(token)), float(table[beam, token]))
            for beam, token in zip(*np.unravel_index(order, table.shape), strict=True)
        ]
        ended = [found(*each) for each in ranked[:num_beams] if each[0][-1] == eos]
        finished = best(finished + ended)
        live = [each for each in ranked if each[0][-1] != eos][:num_beams]
        if num_beams == 1 and ended:
            live = []
        if live and len(finished) == num_beams and steps < num_tokens:
            top = live[0][1]
            reachable = (top / n**penalty for n in range(steps + 1, num_tokens + 1))
            if all(score <= finished[-1].score for score in reachable):
                live = []
    return best(finished + [found(*each) for each in live]), steps


def assert_same(got: list[Found], want: list[Found], atol: float = LOG_PROB_TINY) -> None:
    assert [each.tokens for each in got] == [each.tokens for each in want]
    for name in ("log_prob", "score"):
        np.testing.assert_allclose(
            [getattr(each, name) for each in got],
            [getattr(each, name) for each in want],
            rtol=0,
            atol=atol,
        )
