"""Every form of a call against the oracle: context, indices, dtypes, scale, cap and sinks."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import beam_decode_attn
from tests.beam_decode.calls import Shape, check, dense_call, expected, jagged, paged, run
from tests.tolerances import LARGE_LOGIT_ROUNDING

LENGTHS = np.array([3, 5], np.int32)
SINK = np.array([0.5, -2.0, 3.0, 0.0], np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dense(dtype):
    check(dense_call(Shape(), dtype))


@pytest.mark.parametrize(
    "form",
    [dict, jagged, lambda call: paged(call, page_size=2), lambda call: paged(call, page_size=3)],
    ids=["dense", "jagged", "pages of 2", "pages of 3"],
)
def test_ragged_context(form):
    check(form(dense_call(Shape(), "bfloat16", seqused_k=LENGTHS)))


@pytest.mark.parametrize(
    "heads, kv_heads, index_heads",
    [(4, 4, 4), (4, 2, 2), (4, 2, 4), (6, 2, 1), (6, 2, 2), (4, 1, 1), (4, 1, 4), (1, 1, 1)],
)
def test_indices_of_each_head(heads, kv_heads, index_heads):
    check(dense_call(Shape(heads=heads, kv_heads=kv_heads, index_heads=index_heads)))


def test_index_heads_are_told_apart():
    """Equal indices for all heads would hide a head that reads another head's."""
    call = dense_call(Shape(index_heads=4))
    other = call["topk_indices"].copy()
    other[:, :, 2] = (other[:, :, 2] + 1) % 7
    changed = run(call | {"topk_indices": other})[0] != run(call)[0]
    assert changed[..., 2, :].all()
    assert not changed[..., [0, 1, 3], :].any()


@pytest.mark.parametrize("head_dim", [40, 256])
def test_head_sizes(head_dim):
    check(dense_call(Shape(head_dim=head_dim), "bfloat16"))


@pytest.mark.parametrize(
    "scale",
    [2, np.float32(0.7), np.array(0.3, np.float32), jnp.asarray(0.5, jnp.bfloat16)],
    ids=["int", "numpy scalar", "0-d array", "0-d bf16"],
)
def test_softmax_scale(scale):
    check(dense_call(Shape(), softmax_scale=scale))


@pytest.mark.parametrize("cap", [0.5, 30, 1e30], ids=str)
def test_logits_soft_cap(cap):
    check(dense_call(Shape(), logits_soft_cap=cap))


def test_soft_cap_is_applied_to_scaled_logits_and_before_the_sink():
    scale = np.array(3.0, np.float32)
    check(dense_call(Shape(), logits_soft_cap=1.5, attn_sink=SINK, softmax_scale=scale))


@pytest.mark.parametrize("form", [dict, jagged, lambda call: paged(call, page_size=2)])
def test_everything_at_once(form):
    call = dense_call(Shape(index_heads=2), "float16", seqused_k=LENGTHS)
    call |= {"decode_nums": np.array([6, 1], np.int32), "attn_sink": SINK}
    check(form(call | {"softmax_scale": 0.4, "logits_soft_cap": 2.0}))


def test_decode_nums_of_each_sample():
    call = dense_call(Shape(batch=5))
    check(call | {"decode_nums": np.array([0, 6, 3, -4, 99], np.int32)})


def test_large_logits_do_not_overflow():
    """Logits in the hundreds: exp() of them is far beyond float32."""
    call = dense_call(Shape())
    call["q"] = call["q"] * 256
    out, lse = run(call)
    want_out, want_lse = expected(call)
    assert want_lse.max() > 300
    # The rounding of a logit is in proportion to it, and becomes the weights' relative error.
    np.testing.assert_allclose(lse, want_lse, rtol=LARGE_LOGIT_ROUNDING)
    np.testing.assert_allclose(out, want_out, atol=np.abs(want_lse).max() * LARGE_LOGIT_ROUNDING)


def test_without_lse_the_output_is_the_same():
    call = dense_call(Shape())
    np.testing.assert_array_equal(beam_decode_attn(**call), run(call)[0])


def test_same_call_same_bits():
    call = dense_call(Shape(), "bfloat16", seqused_k=LENGTHS, attn_sink=SINK)
    for first, again in zip(run(call), run(call), strict=True):
        np.testing.assert_array_equal(first, again)
