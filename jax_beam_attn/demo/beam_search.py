"""Beam search in one jitted `lax.while_loop` that never moves the KV cache.

The prompt's keys and values are computed once and shared by all beams. Each step writes the keys
and values of its W beams into W new rows of the beam cache: row = step * W + beam. When the search
drops some beams and continues others twice, no row moves: only the small ancestry table
`topk_indices` ("at step s, beam w descends from this row") is permuted, and `beam_decode_attn`
gathers each beam's own past through it.

Definitions, for a prompt x and a hypothesis y of n tokens (EOS included):

- log_prob(y) = sum of log p(y_i | x, y_<i), and score(y) = log_prob(y) / n ** length_penalty.
- A step ranks the continuations of all live beams by log_prob. Those of the best W that end in EOS
  are finished. The best W that do not end in EOS become the live beams: as W beams have only W
  continuations by EOS, they are among the best 2W.
- Of the finished hypotheses, the W with the best scores are kept. A sample is done when there are W
  and no continuation of a live beam can score better than the worst of them.
- Beams that are still live at the last step count as finished there, without EOS.
- One beam is greedy decoding: it is done at its first EOS, whatever the length penalty.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jax_beam_attn import beam_decode_attn
from jax_beam_attn.demo.model import (
    LlamaConfig,
    LlamaParams,
    causal_attention,
    run_layers,
    unembed,
)


class Context(NamedTuple):
    """The prefilled prompts, each padded at its end to the common length Sk."""

    keys: tuple[jax.Array, ...]  # a layer: [B, Sk, Hkv, D]
    values: tuple[jax.Array, ...]  # a layer: [B, Sk, Hkv, D]
    lengths: jax.Array  # int32 [B]
    logits: jax.Array  # f32 [B, vocab]: what follows the prompt


class History(NamedTuple):
    """All live beams of all steps; entries of steps that never ran are zero."""

    tokens: jax.Array  # int32 [B, T, W]
    parents: jax.Array  # int32 [B, T, W]: which beam of the step before is continued
    log_probs: jax.Array  # f32 [B, T, W]: of the hypothesis up to here; -inf: no hypothesis


class Finished(NamedTuple):
    """The best finished hypotheses, best first."""

    scores: jax.Array  # f32 [B, W]; -inf: no hypothesis
    log_probs: jax.Array  # f32 [B, W]
    rows: jax.Array  # int32 [B, W]: step * W + beam of the last token but EOS; -1: only EOS
    eos: jax.Array  # bool [B, W]: whether EOS follows


class SearchResult(NamedTuple):
    """What a beam search of T steps with W beams found."""

    finished: Finished
    history: History
    num_steps: jax.Array  # int32: the steps that ran, at most T


class _State(NamedTuple):
    step: jax.Array  # int32: the tokens that every live beam has
    log_probs: jax.Array  # f32 [B, W]: of the live beams; -inf: dead
    topk_indices: jax.Array  # int32 [B, 1, 1, T, W]
    k_beam: tuple[jax.Array, ...]  # a layer: [B, T * W, Hkv, D]
    v_beam: tuple[jax.Array, ...]  # a layer: [B, T * W, Hkv, D]
    history: History
    finished: Finished


@functools.partial(jax.jit, static_argnames="config")
def prefill(
    params: LlamaParams, tokens: jax.Array, lengths: jax.Array, *, config: LlamaConfig
) -> Context:
    """Runs the prompts through the model and keeps their keys and values.

    Args:
        params: The model.
        tokens: int [B, Sk], padded at the end with any token.
        lengths: int [B], at least 1.
        config: The model's sizes.
    """
    keys, values = [], []

    def attend(_layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        keys.append(key)
        values.append(value)
        return causal_attention(query, key, value)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = run_layers(params, tokens, positions, attend, config)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return Context(tuple(keys), tuple(values), lengths, unembed(params, last))


@functools.partial(
    jax.jit, static_argnames=("config", "num_beams", "max_new_tokens", "implementation", "on_step")
)
def beam_search(
    params: LlamaParams,
    context: Context,
    eos_token: jax.typing.ArrayLike,
    length_penalty: jax.typing.ArrayLike,
    *,
    config: LlamaConfig,
    num_beams: int,
    max_new_tokens: int,
    implementation: str | None = None,
    on_step: Callable[[jax.Array], None] | None = None,
) -> SearchResult:
    """Continues every prompt by beam search; the module's docstring defines the search.

    Args:
        params: The model.
        context: The prompts, from `prefill`.
        eos_token: int []; a number outside the vocabulary stands for no EOS at all.
        length_penalty: f32 []; 0 compares plain log-probabilities, 1 their means per token.
        config: The model's sizes.
        num_beams: W, at least 1.
        max_new_tokens: T, at least 1.
        implementation: That of `beam_decode_attn`.
        on_step: Called on the host after each decode step with the number of tokens so far,
            possibly late and out of order.
    """
    state = _initial_state(context, num_beams, max_new_tokens, config)
    select = functools.partial(_select_beams, eos_token=eos_token, length_penalty=length_penalty)

    def is_live(state: _State) -> jax.Array:
        return (state.step < max_new_tokens) & jnp.any(state.log_probs > -jnp.inf)

    def advance(state: _State) -> _State:
        logits, state = _decode_step(params, context, state, config, implementation)
        state = select(state, logits)
        if on_step is not None:
            jax.debug.callback(on_step, state.step)
        return state

    batch, vocab_size = context.logits.shape
    prompt_logits = jnp.broadcast_to(context.logits[:, None], (batch, num_beams, vocab_size))
    state = lax.while_loop(is_live, advance, select(state, prompt_logits))

    beams = jnp.arange(num_beams, dtype=jnp.int32)
    unfinished = Finished(
        scores=state.log_probs / _length_divisor(state.step, length_penalty),
        log_probs=state.log_probs,
        rows=jnp.broadcast_to((state.step - 1) * num_beams + beams, state.log_probs.shape),
        eos=jnp.zeros_like(state.finished.eos),
    )
    return SearchResult(_keep_best(state.finished, unfinished), state.history, state.step)


def _initial_state(
    context: Context, num_beams: int, max_new_tokens: int, config: LlamaConfig
) -> _State:
    """No token chosen yet: one live beam, the prompt itself; the others are dead copies of it."""
    batch = context.logits.shape[0]
    per_step = (batch, max_new_tokens, num_beams)
    cache = jnp.zeros(
        (batch, max_new_tokens * num_beams, config.num_kv_heads, config.head_dim),
        context.keys[0].dtype,
    )
    dead = jnp.full((batch, num_beams), -jnp.inf)
    return _State(
        step=jnp.int32(0),
        log_probs=dead.at[:, 0].set(0.0),
        topk_indices=jnp.zeros((batch, 1, 1, max_new_tokens, num_beams), jnp.int32),
        k_beam=(cache,) * config.num_layers,
        v_beam=(cache,) * config.num_layers,
        history=History(
            tokens=jnp.zeros(per_step, jnp.int32),
            parents=jnp.zeros(per_step, jnp.int32),
            log_probs=jnp.zeros(per_step, jnp.float32),
        ),
        finished=Finished(
            scores=dead,
            log_probs=dead,
            rows=jnp.full(dead.shape, -1, jnp.int32),
            eos=jnp.zeros(dead.shape, bool),
        ),
    )


def _decode_step(
    params: LlamaParams,
    context: Context,
    state: _State,
    config: LlamaConfig,
    implementation: str | None,
) -> tuple[jax.Array, _State]:
    """Feeds every live beam's last token: f32 logits [B, W, vocab], and the caches with its KV."""
    tokens = lax.dynamic_index_in_dim(state.history.tokens, state.step - 1, 1, keepdims=False)
    first_row = (state.step - 1) * tokens.shape[1]
    positions = jnp.broadcast_to((context.lengths + state.step - 1)[:, None], tokens.shape)
    k_beam, v_beam = list(state.k_beam), list(state.v_beam)

    def attend(layer: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        # The caches are in the loop's carry, where XLA updates them in place.
        k_beam[layer] = lax.dynamic_update_slice_in_dim(k_beam[layer], key, first_row, 1)
        v_beam[layer] = lax.dynamic_update_slice_in_dim(v_beam[layer], value, first_row, 1)
        out = beam_decode_attn(
            query[:, None],
            context.keys[layer],
            context.values[layer],
            k_beam[layer],
            v_beam[layer],
            state.topk_indices,
            state.step,
            seqused_k=context.lengths,
            implementation=implementation,
        )
        return cast(jax.Array, out)[:, 0]  # no tuple without return_lse

    hidden = run_layers(params, tokens, positions, attend, config)
    return unembed(params, hidden), state._replace(k_beam=tuple(k_beam), v_beam=tuple(v_beam))


def _select_beams(
    state: _State,
    logits: jax.Array,
    eos_token: jax.typing.ArrayLike,
    length_penalty: jax.typing.ArrayLike,
) -> _State:
    """Chooses the next token of every beam from f32 logits [B, W, vocab]."""
    batch, num_beams, vocab_size = logits.shape
    max_new_tokens = state.history.tokens.shape[1]
    step, next_step = state.step, state.step + 1

    continuations = state.log_probs[..., None] + jax.nn.log_softmax(logits)
    candidates, flat_index = lax.top_k(
        continuations.reshape(batch, -1), num_beams * min(2, vocab_size)
    )
    parents, tokens = jnp.divmod(flat_index.astype(jnp.int32), vocab_size)
    is_eos = tokens == eos_token

    ends = is_eos & (jnp.arange(candidates.shape[1]) < num_beams)
    ended = Finished(
        scores=jnp.where(ends, candidates / _length_divisor(next_step, length_penalty), -jnp.inf),
        log_probs=candidates,
        rows=jnp.where(step > 0, (step - 1) * num_beams + parents, -1),
        eos=ends,
    )
    finished = _keep_best(state.finished, ended)

    live, order = lax.top_k(jnp.where(is_eos, -jnp.inf, candidates), num_beams)
    parents = jnp.take_along_axis(parents, order, axis=1)
    tokens = jnp.take_along_axis(tokens, order, axis=1)

    # log_prob only falls, so no live beam will score more than its log_prob of now divided by the
    # largest divisor to come: that of the last length, or, if the penalty is negative, of the next.
    best_divisor = jnp.maximum(
        _length_divisor(next_step + 1, length_penalty),
        _length_divisor(max_new_tokens, length_penalty),
    )
    done = finished.scores[:, -1] >= live[:, 0] / best_divisor
    if num_beams == 1:
        done |= jnp.any(ends & jnp.isfinite(candidates), axis=1)

    own_rows = step * num_beams + jnp.arange(num_beams, dtype=jnp.int32)
    ancestors = jnp.take_along_axis(state.topk_indices, parents[:, None, None, None], axis=-1)
    topk_indices = ancestors.at[..., step, :].set(own_rows)
    chosen = History(tokens, parents, live)
    return state._replace(
        step=next_step,
        log_probs=jnp.where(done[:, None], -jnp.inf, live),
        topk_indices=topk_indices,
        history=jax.tree.map(lambda past, now: past.at[:, step].set(now), state.history, chosen),
        finished=finished,
    )


def _keep_best(kept: Finished, new: Finished) -> Finished:
    """The best of both by score, as many as there were in `kept`; the older one of equals."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), kept, new)
    _, order = lax.top_k(both.scores, kept.scores.shape[1])
    return jax.tree.map(lambda x: jnp.take_along_axis(x, order, axis=1), both)


def _length_divisor(
    length: jax.typing.ArrayLike, length_penalty: jax.typing.ArrayLike
) -> jax.Array:
    """What a log-probability of `length` tokens is divided by to give its score."""
    return jnp.asarray(length, jnp.float32) ** length_penalty
