"""The split heuristic: values worked out by hand, and the rule restated."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_beam_attn import num_splits_heuristic

MIB = 2**20


def _restated(mblocks, sms, n_blocks, m_blocks, kv_bytes, causal, most, l2):
    """The source systems' rule (FlashAttention's `hopper/heuristics.h`), said in another way.

    In the source's floating-point arithmetic, which decides where 85% is met exactly: of 17 and
    20 splits on 142 SMs it says that 17 / 142 < 0.85 * (20 / 142).
    """
    if mblocks >= 0.8 * sms:
        if causal or kv_bytes <= l2 or m_blocks < 2 * sms:
            return 1
        return next(n for n in range(1, most + 1) if n == most or n * l2 >= kv_bytes)
    if n_blocks <= 4:
        return 1
    fills = {}
    for splits in range(1, min(most, sms, n_blocks) + 1):
        waves = mblocks * splits / sms
        fills[splits] = waves / math.ceil(waves)
    return min(n for n, fill in fills.items() if fill >= 0.85 * max(fills.values()))


@pytest.mark.parametrize(
    "arguments, want",
    [
        # 106 of 132 SMs are busy without splitting: 80% is enough.
        ((106, 132, 64, 1, 1), 1),
        # 105 are not: up to four splits keep filling waves to 79.5%, five fill four of them to 99%.
        ((105, 132, 64, 1, 1), 5),
        # 66 blocks: two splits fill one wave exactly.
        ((66, 132, 64, 1, 1), 2),
        # 64 blocks: two splits are 128 of 132, 97%; one is 48%.
        ((64, 132, 64, 1, 1), 2),
        # Few key tiles are not split at all.
        ((1, 132, 4, 1, 1), 1),
        # With five tiles the best is 5 of 132, and 5 * 0.85 = 4.25 asks for 5.
        ((1, 132, 5, 1, 1), 5),
        # One block on 132 SMs: 128 splits at most; 0.85 * 128 = 108.8.
        ((1, 132, 1000, 1, 1), 109),
        # On 108 SMs (A100) 108 splits fill the wave: 0.85 * 108 = 91.8.
        ((1, 108, 1000, 1, 1), 92),
        # On 78 SMs (H20), 8 blocks: 9 splits are 72 of 78; best 39 splits, 4 full waves, 100%:
        # 85% of it is 66.3, first reached by 9.
        ((8, 78, 64, 1, 1), 9),
    ],
)
def test_by_hand(arguments, want):
    assert num_splits_heuristic(*arguments) == want


@pytest.mark.parametrize(
    "size, l2, more, want",
    [
        # Enough blocks, many query tiles, and K and V of a head larger than the L2: pieces of L2.
        (200 * MIB, 50 * MIB, {}, 4),
        (200 * MIB + 1, 50 * MIB, {}, 5),
        (200 * MIB, 60 * MIB, {}, 4),
        (200 * MIB, 126 * MIB, {}, 2),
        (200 * MIB, 40 * MIB, {}, 5),
        (50 * MIB, 50 * MIB, {}, 1),
        (200 * MIB, 50 * MIB, {"is_causal_or_local": True}, 1),
        (200 * MIB, 50 * MIB, {"max_splits": 3}, 3),
    ],
)
def test_larger_than_l2(size, l2, more, want):
    assert num_splits_heuristic(1000, 132, 64, 264, size, size_l2=l2, **more) == want
    # Fewer query tiles than two waves read K and V too few times for it to matter.
    assert num_splits_heuristic(1000, 132, 64, 263, size, size_l2=l2, **more) == 1


def test_default_l2_is_50_mib():
    assert num_splits_heuristic(1000, 132, 64, 264, 50 * MIB) == 1
    assert num_splits_heuristic(1000, 132, 64, 264, 50 * MIB + 1) == 2


@settings(max_examples=settings.default.max_examples * 20)
@given(
    st.integers(1, 400),
    st.sampled_from([1, 20, 72, 78, 108, 128, 132, 142, 148, 170]),
    st.integers(0, 300),
    st.integers(1, 400),
    st.integers(0, 400 * MIB),
    st.booleans(),
    st.sampled_from([1, 2, 32, 128]),
    st.sampled_from([6 * MIB, 40 * MIB, 50 * MIB, 60 * MIB, 126 * MIB]),
)
def test_the_rule_restated(mblocks, sms, n_blocks, m_blocks, kv_bytes, causal, most, l2):
    arguments = (mblocks, sms, n_blocks, m_blocks, kv_bytes, causal, most, l2)
    got = num_splits_heuristic(*arguments)
    assert got == _restated(*arguments)
    assert 1 <= got <= max(most, 1)
    assert math.floor(got) == got
