"""Inputs that broke other systems of this kind, from their public bug reports.

The numbers are those of the project's list of cases. Number 11, a cache whose batch stride passes
2**31 elements, needs a GPU's memory.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import BeamDecodePlan, merge_splits
from tests.beam_decode.calls import (
    CONTEXT,
    Shape,
    assert_same_as,
    assert_same_bits,
    check,
    dense_call,
    expected,
    jagged,
    run,
)
from tests.tolerances import FEW_OPERATIONS, REORDERED, TOLERANCES

IMPLEMENTATIONS = ["reference"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


@pytest.mark.parametrize("width", [1, 2, 4, 9, 10, 11, 12, 14, 15, 17, 20])
def test_1_width_not_a_multiple_of_8(width, implementation):
    shape = Shape(1, width, 2, 1, 128, context=3, beam_rows=width, steps=1)
    check(dense_call(shape, "bfloat16", implementation=implementation))


@pytest.mark.parametrize("num_splits", [1, 2, 7, 32])
def test_2_ragged_and_split_together(num_splits, implementation):
    shape = Shape(batch=3, width=2, heads=2, kv_heads=1, context=4096)
    call = dense_call(shape, seqused_k=np.array([1, 129, 4096], np.int32))
    plan = BeamDecodePlan(num_splits=num_splits)
    check(call | {"implementation": implementation, "plan": plan})


def test_3_both_sides_empty(implementation):
    call = dense_call(Shape(head_dim=64), "float16", implementation=implementation)
    out, lse = run(call | {"seqused_k": np.zeros(2, np.int32), "decode_nums": 0})
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_3_one_empty_sample_among_full_ones(implementation):
    call = dense_call(Shape(batch=3, head_dim=64), "float16", implementation=implementation)
    call["seqused_k"] = np.array([5, 0, 5], np.int32)
    call["decode_nums"] = np.array([6, 0, 6], np.int32)
    out, lse = run(call)
    assert (out[1] == 0).all()
    assert np.isneginf(lse[1]).all()
    assert np.isfinite(lse[[0, 2]]).all()
    check(call, (out, lse))


@pytest.mark.parametrize("filler", [np.nan, np.inf, -np.inf])
def test_4_nan_past_the_length(filler, implementation):
    shape = Shape(batch=4, heads=8, kv_heads=8, head_dim=64, context=128)
    call = dense_call(shape, "bfloat16", implementation=implementation)
    call["seqused_k"] = np.array([32, 64, 96, 48], np.int32)
    zeros, poisoned = dict(call), dict(call)
    for name in CONTEXT:
        past = np.arange(128)[:, None, None] >= call["seqused_k"][:, None, None, None]
        zeros[name] = np.where(past, np.zeros_like(call[name]), call[name])
        poisoned[name] = np.where(past, np.full_like(call[name], filler), call[name])
    result = run(poisoned)
    assert_same_bits(result, run(zeros))
    check(zeros, result)


def test_5_zero_query(implementation):
    """Every weight is alike: the mean of the values, and the logarithm of their number."""
    shape = Shape(heads=8, kv_heads=2, head_dim=128, context=64)
    call = dense_call(shape, "bfloat16", implementation=implementation)
    call |= {"seqused_k": np.array([16, 64], np.int32), "decode_nums": 0}
    call["q"] = np.zeros_like(call["q"])
    values = call["v_context"].astype(np.float64)
    mean = np.stack([values[0, :16].mean(0), values[1].mean(0)])  # [B, Hkv, D]
    out = np.broadcast_to(np.repeat(mean, 4, axis=1)[:, None, None], call["q"].shape)
    lse = np.broadcast_to(np.log([16, 64])[:, None, None, None], out.shape[:-1])
    assert_same_as(run(call), (out, lse), TOLERANCES[call["q"].dtype])


def test_6_lse_with_gqa_and_empty_samples(implementation):
    shape = Shape(batch=64, width=1, heads=8, kv_heads=2, context=6, steps=0)
    call = dense_call(shape, implementation=implementation, plan=BeamDecodePlan(num_splits=3))
    call["seqused_k"] = np.full(64, 6, np.int32)
    call["seqused_k"][[1, 10]] = 0
    out, lse = run(call)
    assert set(np.argwhere(np.isneginf(lse).all(axis=(1, 2, 3))).ravel()) == {1, 10}
    assert np.isneginf(lse).sum() == 2 * 8
    assert (out[[1, 10]] == 0).all()
    check(call, (out, lse))


def test_7_lse_is_a_natural_logarithm(implementation):
    call = dense_call(Shape(1, 1, 1, 1, 8, context=1, steps=0), implementation=implementation)
    call["q"] = np.zeros_like(call["q"])
    call["q"][..., 0] = 8**0.5
    call["k_context"] = np.ones_like(call["k_context"])
    out, lse = run(call)
    np.testing.assert_allclose(lse, 1.0, atol=FEW_OPERATIONS)
    np.testing.assert_allclose(out[0, 0], call["v_context"][0], rtol=FEW_OPERATIONS)


def test_7_merging_two_halves_equals_one_pass(implementation):
    call = dense_call(Shape(context=6), implementation=implementation)
    halves = [
        run(call | {name: call[name][:, half] for name in CONTEXT} | {"decode_nums": steps})
        for half, steps in ((slice(3), 0), (slice(3, None), 6))
    ]
    merged = merge_splits(*(jnp.stack(parts) for parts in zip(*halves, strict=True)))
    assert_same_as(merged, run(call), REORDERED)
    check(call, merged)


def test_8_one_tile_and_one_token(implementation):
    shape = Shape(1, 1, 1, 1, 32, context=257)
    check(dense_call(shape, "bfloat16", implementation=implementation))


def test_9_indices_outside_are_masked(implementation):
    """The rows just before and after a sample's slab are its neighbours': here NaN."""
    call = dense_call(Shape(batch=3, beam_rows=4, index_heads=2), implementation=implementation)
    for name in ("k_beam", "v_beam"):
        call[name][[0, 2]] = np.nan
    call["topk_indices"][1, 0, :, :, 0] = [-1, 4, 0, 2**31 - 1, -(2**31), 3]
    call["topk_indices"][1, 0, :, :, 1] = [-1, 4, 5, 2**31 - 1, -(2**31), -4]
    call["decode_nums"] = np.array([0, 6, 0], np.int32)
    out, lse = run(call)
    check(call, (out, lse))
    # Beam 0 has two rows beside the context, beam 1 none.
    only_context = expected(call | {"decode_nums": 0})
    np.testing.assert_allclose(lse[1, 0, 1], only_context[1][1, 0, 1], atol=REORDERED.lse)
    assert (lse[1, 0, 0] > only_context[1][1, 0, 0] + 1e-3).all()


def test_9_duplicates_count_twice(implementation):
    call = dense_call(Shape(context=0, steps=2), implementation=implementation)
    call["topk_indices"][:] = 5
    out, lse = run(call)
    once = expected(call | {"decode_nums": 1})
    assert_same_as((out, lse), (once[0], once[1] + np.log(2)), TOLERANCES[call["q"].dtype])


def test_10_empty_sample_inside_a_jagged_batch(implementation):
    call = dense_call(Shape(batch=3), "bfloat16", implementation=implementation)
    call = jagged(call | {"seqused_k": np.array([4, 0, 5], np.int32)})
    assert call["cu_seqlens_k"][1] == call["cu_seqlens_k"][2]
    out, lse = run(call)
    check(call, (out, lse))
    # The empty sample attends to its beams only, however far away the context is.
    elsewhere = {name: call[name] * 3 for name in CONTEXT}
    assert_same_bits((out[1], lse[1]), tuple(x[1] for x in run(call | elsewhere)))
