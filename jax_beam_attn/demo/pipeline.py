"""What the demo does: load the model, search, print, verify, draw."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from gguf import GGUFReader
from tokenizers import Tokenizer
from tqdm import tqdm

from jax_beam_attn.demo.beam_search import SearchResult, beam_search, prefill
from jax_beam_attn.demo.clock import Clock
from jax_beam_attn.demo.errors import DemoError
from jax_beam_attn.demo.hypotheses import Hypothesis, read_hypotheses
from jax_beam_attn.demo.model import LlamaConfig, LlamaParams
from jax_beam_attn.demo.padding import pad_tokens
from jax_beam_attn.demo.tokenizer import load_tokenizer
from jax_beam_attn.demo.verify import check, recompute_log_probs
from jax_beam_attn.demo.weights import find_model_file, load_params, metadata, read_config

_DTYPES = {"f32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class _Model(NamedTuple):
    config: LlamaConfig
    params: LlamaParams
    tokenizer: Tokenizer
    eos_token: int
    prompt: list[int]


def run_demo(args: argparse.Namespace) -> None:
    """Runs the demo with checked arguments.

    Raises:
        DemoError: The model is missing, or cannot do what the arguments ask for.
        VerificationError: A log-probability is wrong.
    """
    clock = Clock()
    show_progress = sys.stdout.isatty() and not args.quiet
    progress = functools.partial(tqdm, disable=not show_progress, leave=False)

    with clock.phase("load"):
        model = _load(args, progress)
    with progress(desc="compiling", total=args.new_tokens, unit="token") as bar:
        result = _search(args, model, bar if show_progress else None, clock)
    hypotheses = read_hypotheses(result, 0, model.eos_token)[: args.n_best]
    print(f"SmolLM2-135M-Instruct in {args.dtype} on {jax.devices()[0].device_kind}")
    _print_hypotheses(args.prompt, hypotheses, model.tokenizer)

    if args.verify:
        with clock.phase("verify"):
            recomputed = recompute_log_probs(model.params, model.prompt, hypotheses, model.config)
            bar = progress(recomputed, desc="verifying", total=len(hypotheses))
            difference = check(hypotheses, bar, _DTYPES[args.dtype])
        print(f"verified: a full forward pass gives the same log-probs within {difference:.1e}")
    if args.tree is not None:
        with clock.phase("tree"):
            _draw_tree(args, result, hypotheses, model.tokenizer)
        print(f"tree: {args.tree}")
    decode_steps = int(result.num_steps) - 1
    speed = decode_steps * args.beams / clock.seconds["decode"]
    print(f"decode: {speed:.0f} tokens/s ({args.beams} beams, {decode_steps} steps)")
    print(f"time: {clock.report()}")


def _load(args: argparse.Namespace, progress: Callable[..., tqdm]) -> _Model:
    reader = GGUFReader(find_model_file())
    config = read_config(reader)
    tokenizer = load_tokenizer(reader)
    prompt = tokenizer.encode(args.prompt).ids
    if not prompt:
        raise DemoError("--prompt: got no text, expected at least one token")
    if len(prompt) + args.new_tokens > config.context_length:
        raise DemoError(
            f"--prompt: got {len(prompt)} tokens, which with --new-tokens = {args.new_tokens} are "
            f"more than the model's context of {config.context_length}"
        )
    with progress(desc="loading", total=config.num_layers, unit="layer") as bar:
        params = load_params(reader, config, _DTYPES[args.dtype], on_layer=bar.update)
    eos_token = metadata(reader, "tokenizer.ggml.eos_token_id")
    return _Model(config, params, tokenizer, eos_token, prompt)


def _search(
    args: argparse.Namespace, model: _Model, bar: tqdm | None, clock: Clock
) -> SearchResult:
    """Compiles and runs the search; returns arrays of the host."""

    def show_step(num_tokens: jax.Array) -> None:
        assert bar is not None
        bar.update(max(0, int(num_tokens) - bar.n))

    tokens, lengths = pad_tokens([model.prompt], model.config.context_length)
    scalars = (model.eos_token, args.length_penalty)
    with clock.phase("compile"):
        prompts = (model.params, tokens, lengths)
        run_prefill = prefill.lower(*prompts, config=model.config).compile()
        context = jax.eval_shape(functools.partial(prefill, config=model.config), *prompts)
        try:
            run_search = beam_search.lower(
                model.params,
                context,
                *scalars,
                config=model.config,
                num_beams=args.beams,
                max_new_tokens=args.new_tokens,
                implementation=args.implementation,
                on_step=None if bar is None else show_step,
            ).compile()
        except ValueError as error:
            if args.implementation is None:
                raise
            raise DemoError(f"--implementation: {error}") from error
    with clock.phase("prefill"):
        context = jax.block_until_ready(run_prefill(*prompts))
    if bar is not None:
        bar.set_description("decoding")
    with clock.phase("decode"):
        result = jax.block_until_ready(run_search(model.params, context, *scalars))
    jax.effects_barrier()  # now the bar has heard of the last step
    return jax.device_get(result)


def _print_hypotheses(prompt: str, hypotheses: Sequence[Hypothesis], tokenizer: Tokenizer) -> None:
    print(f"\n{prompt}\n\n  #    score  log-prob  tokens")
    for rank, hypothesis in enumerate(hypotheses, 1):
        text = tokenizer.decode(list(hypothesis.tokens), skip_special_tokens=False)
        text = text.replace("\n", "\\n")
        print(
            f"{rank:3} {hypothesis.score:8.4f} {hypothesis.log_prob:9.4f} "
            f"{len(hypothesis.tokens):7}  …{text}"
        )
    print()


def _draw_tree(
    args: argparse.Namespace,
    result: SearchResult,
    hypotheses: Sequence[Hypothesis],
    tokenizer: Tokenizer,
) -> None:
    from jax_beam_attn.demo.tree import draw_tree  # imports matplotlib, needed only here

    draw_tree(
        args.tree,
        result,
        0,
        hypotheses,
        lambda token: tokenizer.decode([token], skip_special_tokens=False),
        args.prompt,
    )
