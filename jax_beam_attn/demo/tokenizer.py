"""The tokenizer that a GGUF file describes."""

from __future__ import annotations

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jax_beam_attn.demo.weights import metadata


def load_tokenizer(reader: GGUFReader) -> Tokenizer:
    """Builds the byte-level BPE tokenizer of SmolLM2 from the file's vocabulary and merges.

    Digits are split one by one ("smollm" among GGUF's pre-tokenizers); no BOS token and no
    leading space are added.
    """
    vocabulary = metadata(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in metadata(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=merges)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    token_types = metadata(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(vocabulary, token_types, strict=True)
            if kind == TokenType.CONTROL
        ]
    )
    return tokenizer
