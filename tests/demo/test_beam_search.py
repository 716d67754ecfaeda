import itertools

import jax
import numpy as np
import pytest

from jax_beam_attn.demo.hypotheses import read_hypotheses
from tests.demo.searches import (
    NO_EOS,
    assert_same,
    brute_force_search,
    found_by,
    next_log_probs,
    search,
)
from tests.demo.tiny import tiny_config, tiny_params

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize(
    ("vocab_size", "num_beams", "num_tokens", "can_stop_early"),
    [
        pytest.param(13, 1, 7, True, id="greedy"),
        pytest.param(13, 4, 9, True, id="four beams"),
        pytest.param(13, 3, 1, False, id="one token"),
        pytest.param(3, 6, 4, True, id="more beams than tokens"),
        pytest.param(1, 2, 3, True, id="a vocabulary of one"),
    ],
)
def test_equals_brute_force(vocab_size, num_beams, num_tokens, can_stop_early):
    config = tiny_config(vocab_size)
    prompt = [token % vocab_size for token in PROMPT]
    stopped_early = ended = 0
    for seed, penalty in itertools.product(range(3), (-1.0, 0.0, 1.0, 2.5)):
        params = tiny_params(config, seed)
        # A token that really comes up, so that hypotheses end; without one for one of the seeds.
        likely = next_log_probs(params, config, [prompt], num_beams)[0].argmax()
        eos = NO_EOS if seed == 2 else int(likely)
        sizes = (prompt, num_beams, num_tokens, eos, penalty)
        want, steps = brute_force_search(params, config, *sizes)
        result = search(params, config, [prompt], *sizes[1:])
        assert_same(found_by(result, eos), want)
        assert int(result.num_steps) == steps
        stopped_early += steps < num_tokens
        ended += sum(each.tokens[-1] == eos for each in want)
    assert ended
    assert bool(stopped_early) == can_stop_early


def test_samples_of_a_batch_are_searched_independently():
    config = tiny_config()
    params = tiny_params(config, seed=2)
    prompts = [PROMPT, [7, 7], PROMPT * 3]
    sizes = {"num_beams": 4, "num_tokens": 9, "eos": 8, "penalty": -1.0}
    together = search(params, config, prompts, **sizes)
    steps = []
    for sample, prompt in enumerate(prompts):
        alone = search(params, config, [prompt], **sizes)
        assert_same(found_by(together, 8, sample), found_by(alone, 8))
        steps.append(int(alone.num_steps))
    assert steps == [2, 9, 4]  # two of them were done earlier and waited for the other
    assert int(together.num_steps) == 9


def test_padding_of_the_prompt_does_not_matter():
    config = tiny_config()
    params = tiny_params(config)
    long_prompt = [token % 13 for token in range(65)]  # padded to 128
    want, _ = brute_force_search(params, config, long_prompt, 4, 9)
    assert_same(found_by(search(params, config, [long_prompt], 4, 9)), want)


def test_path_leads_through_the_tokens():
    config = tiny_config()
    result = jax.device_get(search(tiny_params(config), config, [PROMPT], 4, 9))
    for hypothesis in read_hypotheses(result, 0, NO_EOS):
        assert len(hypothesis.path) == 9
        steps = np.arange(9)
        np.testing.assert_array_equal(
            result.history.tokens[0, steps, hypothesis.path], hypothesis.tokens
        )
        np.testing.assert_array_equal(
            result.history.parents[0, steps[1:], hypothesis.path[1:]], hypothesis.path[:-1]
        )
        assert result.history.log_probs[0, 8, hypothesis.path[-1]] == hypothesis.log_prob
