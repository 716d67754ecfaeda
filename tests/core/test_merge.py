"""The LSE merge and the sink: exact for empty parts, equal to one pass over all keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_beam_attn import merge_splits
from jax_beam_attn._core.merge import apply_sink
from tests.tolerances import FEW_OPERATIONS, REORDERED, assert_lse_close, assert_out_close

merge = jax.jit(merge_splits)


def _attention(logits, values):
    """Softmax attention in float64 over the keys of axis -1: out [..., D] and lse [...]."""
    if logits.shape[-1] == 0:
        return np.zeros((*logits.shape[:-1], values.shape[-1])), np.full(logits.shape[:-1], -np.inf)
    peak = logits.max(-1, keepdims=True)
    weights = np.exp(logits - peak)
    total = weights.sum(-1)
    return weights @ values / total[..., None], peak[..., 0] + np.log(total)


def _random_part(keys, seed, rows=3, dim=8):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, keys)) * 4, rng.standard_normal((keys, dim))


@given(st.lists(st.integers(0, 4), min_size=3, max_size=3), st.integers(0, 2**32 - 1))
def test_equals_one_pass(sizes, seed):
    """Any cut of the keys into parts, empty ones among them."""
    logits, values = _random_part(sum(sizes), seed)
    cuts = np.cumsum(sizes)[:-1]
    parts = [
        _attention(part, part_values)
        for part, part_values in zip(
            np.split(logits, cuts, axis=1), np.split(values, cuts, axis=0), strict=True
        )
    ]
    out, lse = merge(*(np.stack(x).astype(np.float32) for x in zip(*parts, strict=True)))
    want_out, want_lse = _attention(logits, values)
    assert_out_close(out, want_out, REORDERED)
    assert_lse_close(lse, want_lse, REORDERED)


def test_one_part_is_returned_bit_for_bit():
    out, lse = (x.astype(np.float32) for x in _attention(*_random_part(5, 0)))
    merged_out, merged_lse = merge(out[None], lse[None])
    np.testing.assert_array_equal(merged_out, out)
    np.testing.assert_array_equal(merged_lse, lse)


@pytest.mark.parametrize("rubbish", [0.0, np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_part_changes_no_bit(rubbish, place):
    """Whatever it holds: its buffer may never have been written."""
    parts = [_attention(*_random_part(4, seed)) for seed in range(2)]
    out, lse = (np.stack(x).astype(np.float32) for x in zip(*parts, strict=True))
    want = merge(out, lse)
    got = merge(np.insert(out, place, rubbish, axis=0), np.insert(lse, place, -np.inf, axis=0))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("rubbish", [0.0, np.nan, np.inf])
def test_nothing_but_empty_parts(rubbish):
    out, lse = merge(np.full((3, 2, 8), rubbish, np.float32), np.full((3, 2), -np.inf, np.float32))
    np.testing.assert_array_equal(out, np.zeros((2, 8)))
    np.testing.assert_array_equal(lse, np.full(2, -np.inf))


def test_rows_are_merged_one_by_one():
    """A part may be empty for one row and not for another."""
    out = np.array([[[1.0], [np.nan]], [[np.nan], [4.0]]], np.float32)
    lse = np.array([[0.5, -np.inf], [-np.inf, 2.0]], np.float32)
    merged_out, merged_lse = merge(out, lse)
    np.testing.assert_array_equal(merged_out, [[1.0], [4.0]])
    np.testing.assert_array_equal(merged_lse, [0.5, 2.0])


def test_lse_far_apart_and_large():
    """exp() of these is beyond float32, their differences are not."""
    out = np.array([[1.0], [3.0], [7.0]], np.float32)[:, None]
    for base in (1e4, -1e4, 500.0):
        merged_out, merged_lse = merge(out, np.array([[base], [base], [base - 300]], np.float32))
        np.testing.assert_allclose(merged_out, [[2.0]], rtol=FEW_OPERATIONS)
        np.testing.assert_allclose(merged_lse, [base + np.log(2)], rtol=FEW_OPERATIONS)


def test_nan_in_a_full_part_is_not_hidden():
    out, lse = np.array([[[np.nan]], [[1.0]]], np.float32), np.zeros((2, 1), np.float32)
    assert np.isnan(merge(out, lse)[0]).all()
    assert np.isnan(merge(np.ones((2, 1, 1), np.float32), lse * np.nan)[1]).all()


OUT = np.array([[2.0, -4.0]], np.float32)


@pytest.mark.parametrize(
    "lse, sink, share",
    [
        (0.0, 0.0, 1 / 2),
        (np.log(3), 0.0, 3 / 4),
        (1.0, 1.0 + np.log(7), 1 / 8),
        (5.0, -np.inf, 1),
        (5.0, np.inf, 0),
        (5.0, 3e38, 0),
        (5.0, -3e38, 1),
        (-1e4, 3e38, 0),
        (-np.inf, 0.0, 0),
        (-np.inf, np.inf, 0),
        (-np.inf, -np.inf, 0),
        (-np.inf, 3e38, 0),
        (-np.inf, -3e38, 0),
    ],
)
def test_sink(lse, sink, share):
    """1 / (1 + exp(sink - lse)) of the output stays; an empty row has output 0 already."""
    out = np.zeros_like(OUT) if np.isneginf(lse) else OUT
    got = apply_sink(jnp.asarray(out), jnp.float32([lse]), jnp.float32(sink))
    if share in (0, 1):
        np.testing.assert_array_equal(got, share * out)
    else:
        np.testing.assert_allclose(got, share * out, rtol=FEW_OPERATIONS)


def test_the_merge_of_an_infinite_part_is_no_surprise_under_strict_rules():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        out, lse = merge_splits(jnp.ones((2, 3, 4)), jnp.zeros((2, 3)))
    np.testing.assert_allclose(out, np.ones((3, 4)), rtol=FEW_OPERATIONS)
    np.testing.assert_allclose(lse, np.full(3, np.log(2)), rtol=FEW_OPERATIONS)
