"""Searches with the real model."""

import numpy as np
import pytest

from tests.demo.searches import (
    assert_same,
    brute_force_search,
    found_by,
    next_log_probs,
    search,
)
from tests.tolerances import LOG_PROB_SMOLLM2


def test_one_beam_is_argmax_decoding(smollm2):
    num_tokens = 10
    prompt = smollm2.tokenizer.encode("The most surprising thing about the deep sea is").ids
    model = smollm2.params, smollm2.config
    result = search(*model, [prompt], 1, num_tokens, smollm2.eos_token)
    (found,) = found_by(result, smollm2.eos_token)
    greedy = []
    while len(greedy) < num_tokens and smollm2.eos_token not in greedy:
        greedy.append(int(np.argmax(next_log_probs(*model, [prompt + greedy], 1))))
    assert list(found.tokens) == greedy


@pytest.mark.parametrize(("eos", "penalty"), [("<|im_end|>", 1.0), ("\n", 0.0)])
def test_four_beams_equal_brute_force(smollm2, eos, penalty):
    prompt = smollm2.tokenizer.encode("Question: What is the capital of France?\nAnswer:").ids
    (eos_token,) = smollm2.tokenizer.encode(eos).ids
    model = smollm2.params, smollm2.config
    sizes = {"num_beams": 4, "num_tokens": 10, "eos": eos_token, "penalty": penalty}
    want, steps = brute_force_search(*model, prompt, **sizes)
    assert any(each.tokens[-1] == eos_token for each in want)
    result = search(*model, [prompt], **sizes)
    assert_same(found_by(result, eos_token), want, atol=LOG_PROB_SMOLLM2)
    assert int(result.num_steps) == steps
