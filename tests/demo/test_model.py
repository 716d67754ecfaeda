"""The real model, on known text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_beam_attn.demo import model
from jax_beam_attn.demo.padding import pad_tokens

# From the beginning of "Pride and Prejudice" by Jane Austen, 1813.
TEXT = """\
It is a truth universally acknowledged, that a single man in possession of a good fortune, must \
be in want of a wife.

However little known the feelings or views of such a man may be on his first entering a \
neighbourhood, this truth is so well fixed in the minds of the surrounding families, that he is \
considered as the rightful property of some one or other of their daughters.

"My dear Mr. Bennet," said his lady to him one day, "have you heard that Netherfield Park is let \
at last?"

Mr. Bennet replied that he had not.

"But it is," returned she; "for Mrs. Long has just been here, and she told me all about it."

Mr. Bennet made no answer.

"Do not you want to know who has taken it?" cried his wife impatiently.

"You want to tell me, and I have no objection to hearing it."

This was invitation enough.

"Why, my dear, you must know, Mrs. Long says that Netherfield is taken by a young man of large \
fortune from the north of England; that he came down on Monday in a chaise and four to see the \
place, and was so much delighted with it that he agreed with Mr. Morris immediately; that he is \
to take possession before Michaelmas, and some of his servants are to be in the house by the end \
of next week."

"What is his name?"

"Bingley."

"Is he married or single?"

"Oh! single, my dear, to be sure! A single man of large fortune; four or five thousand a year. \
What a fine thing for our girls!"
"""


def mean_nll(smollm2) -> float:
    """Negative log-likelihood per token of TEXT, in nats."""
    sequence = smollm2.tokenizer.encode(TEXT).ids
    assert len(sequence) > 300
    tokens, _ = pad_tokens([sequence], smollm2.config.context_length)

    @functools.partial(jax.jit, static_argnames="config")
    def next_token_log_probs(params, tokens, config):
        hidden = model.forward(params, tokens, config)[:, :-1]
        log_probs = jax.nn.log_softmax(model.unembed(params, hidden))
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[0, :, 0]

    log_probs = next_token_log_probs(smollm2.params, tokens, config=smollm2.config)
    return -float(np.mean(log_probs[: len(sequence) - 1]))


def test_nll_of_known_text(smollm2):
    assert mean_nll(smollm2) < 3


def test_half_split_rope_would_be_noticed(smollm2, monkeypatch):
    def half_split_rope(x, positions, theta):
        half = x.shape[-1] // 2
        interleaved = jnp.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)
        rotated = interleaved_rope(interleaved, positions, theta)
        return jnp.concatenate([rotated[..., 0::2], rotated[..., 1::2]], axis=-1)

    interleaved_rope = model.rope
    monkeypatch.setattr(model, "rope", half_split_rope)
    assert mean_nll(smollm2) > 4


def test_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(TEXT).ids
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("in 1813").tokens == ["in", "Ġ", "1", "8", "1", "3"]
    assert tokenizer.encode("<|im_end|>").ids == [smollm2.eos_token]
