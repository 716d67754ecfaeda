"""`python -m bench.turboquant_quality`: what a quantised KV cache costs a real model.

SmolLM2-135M reads English prose, and the perplexity of each token given those before it in its
window says how well. All settings share the weights (bf16) and the arithmetic (float32 outside of
attention). Keys and values are what differs: bf16, or stored by `turboquant_store` and attended to
by `turboquant_attention`, a token's own ones included.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader

from bench.prose import read_prose
from bench.stamp import add_commit_option, make_stamp
from jax_beam_attn import (
    TurboQuantFormat,
    hadamard_rotation,
    lloyd_max_centroids,
    turboquant_attention,
    turboquant_store,
)
from jax_beam_attn.demo.model import (
    LlamaConfig,
    LlamaParams,
    causal_attention,
    run_layers,
    unembed,
)
from jax_beam_attn.demo.tokenizer import load_tokenizer
from jax_beam_attn.demo.weights import find_model_file, load_params, read_config

_PRESETS = ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")
_BLOCK_SIZE = 16
_END_LAYERS = 2  # so many at either end stay in bf16 where a setting says so


@dataclasses.dataclass(frozen=True)
class Setting:
    """How the KV cache is stored.

    Attributes:
        cache: "bf16" or a preset of `TurboQuantFormat`.
        random_signs: Whether the rotation of keys has random signs; FP8 keys have no rotation.
        bf16_ends: Whether the first and the last two layers stay in bf16.
    """

    cache: str
    random_signs: bool = False
    bf16_ends: bool = False

    def is_bf16(self, layer: int, num_layers: int) -> bool:
        """Whether a layer's cache is bf16."""
        at_end = min(layer, num_layers - 1 - layer) < _END_LAYERS
        return self.cache == "bf16" or (self.bf16_ends and at_end)

    def format(self, config: LlamaConfig) -> TurboQuantFormat:
        """The format of the other layers' caches."""
        return TurboQuantFormat.preset(
            self.cache,
            head_dim=config.head_dim,
            num_kv_heads=config.num_kv_heads,
            block_size=_BLOCK_SIZE,
        )


@dataclasses.dataclass(frozen=True)
class Result:
    """A setting's perplexity, and the bytes of KV cache a token takes in all layers together."""

    setting: Setting
    perplexity: float
    bytes_per_token: int


def all_settings() -> list[Setting]:
    """Those that are compared."""
    settings = [Setting("bf16")]
    for preset in _PRESETS:
        for signs in (False,) if preset == "k8v4" else (False, True):
            settings += [Setting(preset, signs, ends) for ends in (False, True)]
    return settings


def bytes_per_token(setting: Setting, config: LlamaConfig) -> int:
    """Of KV cache, in all layers."""
    plain = sum(setting.is_bf16(layer, config.num_layers) for layer in range(config.num_layers))
    total = plain * 2 * 2 * config.num_kv_heads * config.head_dim
    if plain < config.num_layers:
        slots = config.num_kv_heads * setting.format(config).slot_bytes
        total += (config.num_layers - plain) * slots
    return total


def perplexity(
    params: LlamaParams, tokens: jax.Array, config: LlamaConfig, setting: Setting
) -> float:
    """Perplexity of all tokens but the first of each window, given those before in it.

    Args:
        params: The model, in the dtype that plain keys and values are to have.
        tokens: int32 [windows, window].
        config: The model's sizes.
        setting: How keys and values are stored.
    """
    attend = functools.partial(_attend_quantized, **_codebook(setting, config))

    def attention(layer, query, key, value):
        of_layer = _attend_plain if setting.is_bf16(layer, config.num_layers) else attend
        return of_layer(query, key, value)

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Not under jit: the layers are alike, so that each operation is compiled once for all layers
    # and settings, and not thirty times for each.
    hidden = run_layers(params, tokens, positions, attention, config)
    return math.exp(float(_mean_nll(params, hidden, tokens)))


@jax.jit
def _mean_nll(params: LlamaParams, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """Window by window: the logits of all would take gigabytes."""

    def of_window(window):
        hidden, tokens = window
        log_probs = jax.nn.log_softmax(unembed(params, hidden[:-1]))
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[1:, None], axis=1))

    return jnp.mean(jax.lax.map(of_window, (hidden, tokens)))


_attend_plain = jax.jit(causal_attention)


def _codebook(setting: Setting, config: LlamaConfig) -> dict[str, Any]:
    """Format, rotation and centroids of a setting."""
    if setting.cache == "bf16":
        return {}
    format = setting.format(config)
    if format.key_is_fp8:
        return {"format": format, "rotation": None, "centroids": None}
    signs = jax.random.key(0) if setting.random_signs else None
    return {
        "format": format,
        "rotation": hadamard_rotation(config.head_dim, signs),
        "centroids": lloyd_max_centroids(format.key_bits, config.head_dim),
    }


@functools.partial(jax.jit, static_argnames="format")
def _attend_quantized(query, key, value, *, format, rotation, centroids):
    """Stores all keys and values [B, N, Hkv, D], one request a window; attends causally."""
    windows, window = query.shape[:2]
    blocks = -(-window // format.block_size)
    first = jnp.arange(windows) * blocks * format.block_size
    flat = (windows * window, -1, format.head_dim)
    codebook = {"format": format, "rotation": rotation, "centroids": centroids}
    cache = turboquant_store(
        jnp.zeros(format.cache_shape(windows * blocks), jnp.uint8),
        key.reshape(flat),
        value.reshape(flat),
        (first[:, None] + jnp.arange(window)).reshape(-1),
        **codebook,
    )
    out = turboquant_attention(
        query.reshape(flat),
        cache,
        jnp.arange(windows * blocks).reshape(windows, blocks),
        jnp.full(windows, window),
        jnp.arange(windows + 1) * window,
        max_query_len=window,
        **codebook,
    )
    return cast(jax.Array, out).reshape(query.shape)


def format_table(results: Sequence[Result]) -> str:
    """As Markdown; the first result is what the others are compared with."""
    lines = [
        "| KV cache | rotation | first and last two layers | perplexity | more than bf16 "
        "| KV bytes a token |",
        "|---|---|---|---|---|---|",
    ]
    base = results[0]
    for result in results:
        setting = result.setting
        rotation = "-"
        if setting.cache not in ("bf16", "k8v4"):
            rotation = "random signs" if setting.random_signs else "Hadamard"
        ends = "bf16" if setting.bf16_ends or setting.cache == "bf16" else "the same"
        lines.append(
            f"| {setting.cache} | {rotation} | {ends} | {result.perplexity:.3f} "
            f"| {result.perplexity / base.perplexity - 1:+.2%} "
            f"| {result.bytes_per_token:,} ({result.bytes_per_token / base.bytes_per_token:.0%}) |"
        )
    return "\n".join(lines)


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
    """Perplexity over bytes a token, an SVG."""
    from matplotlib.figure import Figure  # slow to import, needed only here

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for signs, ends, marker, label in (
        (False, False, "o", "Hadamard"),
        (True, False, "s", "random signs"),
        (False, True, "^", "Hadamard, first and last two layers bf16"),
        (True, True, "D", "random signs, first and last two layers bf16"),
    ):
        group = [
            r for r in results if (r.setting.random_signs, r.setting.bf16_ends) == (signs, ends)
        ]
        x, y = [r.bytes_per_token for r in group], [r.perplexity for r in group]
        axes.plot(x, y, marker, label=label)
        for result in group if not signs and not ends else ():
            axes.annotate(
                result.setting.cache,
                (result.bytes_per_token, result.perplexity),
                xytext=(8, -4),
                textcoords="offset points",
            )
    axes.margins(0.1)
    axes.set_xlabel("KV bytes a token, all layers")
    axes.set_ylabel("perplexity")
    axes.set_title("SmolLM2-135M on English prose")
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    stamp = make_stamp(options.commit)
    reader = GGUFReader(find_model_file())
    config = read_config(reader)
    text = read_prose()
    tokens = np.array(load_tokenizer(reader).encode(text).ids[: options.tokens], np.int32)
    if not 2 <= options.window <= min(config.context_length, len(tokens)):
        print(
            f"--window: got {options.window}, expected from 2 to {config.context_length} and to "
            f"{len(tokens)}, the number of tokens",
            file=sys.stderr,
        )
        return 1
    windows = len(tokens) // options.window
    tokens = tokens[: windows * options.window].reshape(windows, options.window)
    params = load_params(reader, config, jnp.bfloat16)
    results = []
    for setting in all_settings():
        value = perplexity(params, jnp.asarray(tokens), config, setting)
        results.append(Result(setting, value, bytes_per_token(setting, config)))
        print(f"{setting}: {value:.3f}", flush=True)
    print(f"\n{stamp.gpu}, {tokens.size} tokens in windows of {options.window}")
    print(format_table(results))
    if options.out is not None:
        document = {
            **dataclasses.asdict(stamp),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
            "tokens": tokens.size,
            "window": options.window,
            "results": [dataclasses.asdict(result) for result in results],
        }
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "turboquant_quality.json"
        path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        draw(results, path.with_suffix(".svg"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.turboquant_quality", description=__doc__)
    parser.add_argument("--tokens", type=int, default=40960, help="of the text (default: 40960)")
    parser.add_argument("--window", type=int, default=2048, help="tokens read at a time")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="folder for turboquant_quality.json and .svg (default: not written)",
    )
    add_commit_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
