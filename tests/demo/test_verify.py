import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn.demo import beam_search, verify
from jax_beam_attn.demo.errors import VerificationError
from jax_beam_attn.demo.hypotheses import Hypothesis, read_hypotheses
from tests.demo.searches import NO_EOS, search
from tests.demo.tiny import tiny_config, tiny_params

PROMPT = [3, 1, 4, 1, 5]
CONFIG = tiny_config()


def find(dtype="float32", num_beams=4, num_tokens=9):
    params = jax.tree.map(lambda x: x.astype(dtype), tiny_params(CONFIG))
    result = search(params, CONFIG, [PROMPT], num_beams, num_tokens)
    return params, read_hypotheses(result, 0, NO_EOS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_search_is_verified(dtype):
    params, hypotheses = find(dtype)
    recomputed = verify.recompute_log_probs(params, PROMPT, hypotheses, CONFIG)
    largest = verify.check(hypotheses, recomputed, dtype)
    assert largest <= verify.TOLERANCES[dtype]


@pytest.mark.parametrize("error", [0.1, -0.1, np.nan])
def test_a_tampered_log_prob_is_noticed(error):
    params, hypotheses = find()
    wrong = dataclasses.replace(hypotheses[2], log_prob=hypotheses[2].log_prob + error)
    tampered = [*hypotheses[:2], wrong, *hypotheses[3:]]
    recomputed = verify.recompute_log_probs(params, PROMPT, tampered, CONFIG)
    with pytest.raises(VerificationError, match="hypothesis 3"):
        verify.check(tampered, recomputed, "float32")


def test_a_wrong_ancestor_is_noticed(monkeypatch):
    def forget_ancestry(q, k_context, v_context, k_beam, v_beam, topk_indices, *args, **kwargs):
        rows = jnp.arange(topk_indices.size, dtype=jnp.int32).reshape(topk_indices.shape)
        return operator(q, k_context, v_context, k_beam, v_beam, rows, *args, **kwargs)

    operator = beam_search.beam_decode_attn
    monkeypatch.setattr(beam_search, "beam_decode_attn", forget_ancestry)
    params, hypotheses = find(num_tokens=8)  # a size of its own, that is not compiled yet
    recomputed = verify.recompute_log_probs(params, PROMPT, hypotheses, CONFIG)
    with pytest.raises(VerificationError):
        verify.check(hypotheses, recomputed, "float32")


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float32", 2e-3), ("float16", 1e-2), ("bfloat16", 6e-2)]
)
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_limit_is_of_the_whole_hypothesis_whatever_its_length(dtype, limit, num_tokens):
    tokens = (1,) * num_tokens
    hypothesis = Hypothesis(tokens=tokens, log_prob=-1.0, score=-1.0, path=(0,) * num_tokens)
    assert verify.check([hypothesis], [-1.0 - 0.9 * limit], dtype) == pytest.approx(0.9 * limit)
    with pytest.raises(VerificationError, match="hypothesis 1 has log-probability"):
        verify.check([hypothesis], [-1.0 - 1.1 * limit], dtype)


def test_equality_passes_and_nan_fails():
    hypothesis = Hypothesis(tokens=(1,), log_prob=-1.0, score=-1.0, path=(0,))
    assert verify.check([hypothesis], [-1.0], "float16") == 0.0
    with pytest.raises(VerificationError):
        verify.check([hypothesis], [float("nan")], "float16")
