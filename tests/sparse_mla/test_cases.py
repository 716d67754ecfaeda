"""Inputs that broke other systems of this kind, from their public bug reports.

The numbers are those of the project's list of cases.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import sparse_mla_decode
from tests.sparse_mla.calls import (
    FORMATS,
    Shape,
    assert_same_bits,
    check,
    fill_unused,
    make_call,
    run,
)
from tests.sparse_mla.oracle import BF16
from tests.tolerances import FEW_OPERATIONS, TOLERANCES

IMPLEMENTATIONS = ["reference"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def one_key(implementation, **more):
    """A bf16 call whose only key scores 1: the query and the key have one entry."""
    call = make_call(Shape(batch=1, seqlen_q=1, heads=2, topk=1, num_blocks=1, format="bf16"))
    for name in ("q", "kv_cache"):
        call[name] = np.zeros_like(call[name])
        call[name][..., 0] = 1
    return call | {"softmax_scale": 1.0, "implementation": implementation} | more


def test_1_a_scale_that_is_no_power_of_two(implementation):
    call = make_call(
        Shape(batch=1, seqlen_q=1, topk=1, num_blocks=1), implementation=implementation
    )
    call["kv_cache"][..., :512] = 0x38  # 1.0
    call["kv_cache"][..., 512:528] = np.full(4, 0.01171875, np.float32).view(np.uint8)
    out, _ = run(call)
    np.testing.assert_array_equal(out.astype(np.float32), np.float32(0.01171875))


@pytest.mark.parametrize("format", FORMATS)
def test_2_an_index_past_the_end_is_as_minus_one(format, implementation):
    call = make_call(Shape(format=format, extra_topk=4), implementation=implementation)
    past = np.array([12, 13, 2**31 - 1, -(2**31), -2], np.int32)
    for prefix in ("", "extra_"):
        indices = call[f"{prefix}indices"].copy()
        indices[..., 1] = indices[..., 3] = -1
        call[f"{prefix}indices"] = indices
    masked = run(call)
    check(call, masked)
    for slot in past:
        other = dict(call)
        for prefix in ("", "extra_"):
            other[f"{prefix}indices"] = np.where(
                call[f"{prefix}indices"] == -1, slot, call[f"{prefix}indices"]
            )
        assert_same_bits(run(other), masked)


@pytest.mark.parametrize("format", FORMATS)
def test_3_slot_0_behind_masked_entries(format, implementation):
    """Where -1 is clamped to a slot that exists, that slot is 0."""
    call = make_call(Shape(format=format, extra_topk=5), implementation=implementation)
    for prefix in ("", "extra_"):
        indices = np.maximum(call[f"{prefix}indices"], 1)
        indices[..., ::2] = -1
        call[f"{prefix}indices"] = indices
    check(call)
    results = []
    for filler in (0x00, 0x42, 0xFF):
        poisoned = fill_unused(fill_unused(call, filler), filler, "extra_")
        results.append(run(poisoned))
        assert np.isfinite(results[-1][0].astype(np.float32)).all()
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ndim", [1, 2])
def test_4_nan_past_the_length(format, ndim, implementation):
    """Tokens that only entries past the length name hold NaN."""
    call = make_call(Shape(format=format, extra_topk=6), implementation=implementation)
    lengths = np.array([[2, 0, 5], [1, 7, 3]] if ndim == 2 else [3, 1], np.int32)
    call |= {"topk_length": lengths, "extra_topk_length": lengths[::-1].copy()}
    for prefix, slots in (("", 12), ("extra_", 10)):
        indices = call[f"{prefix}indices"] % (slots // 2)
        length = lengths if not prefix else lengths[::-1]
        past = np.arange(indices.shape[-1]) >= length.reshape(*length.shape, *(1,) * (3 - ndim))
        call[f"{prefix}indices"] = np.where(past, indices + slots // 2, indices)
    check(call)
    poisoned = fill_unused(fill_unused(call, 0xFF), 0xFF, "extra_")
    assert_same_bits(run(poisoned), run(call))


@pytest.mark.parametrize("format", FORMATS)
def test_5_every_index_masked(format, implementation):
    call = make_call(Shape(format=format, extra_topk=3), implementation=implementation)
    call["attn_sink"] = np.array([0, np.inf, -np.inf, 3e38], np.float32)
    for prefix in ("", "extra_"):
        call[f"{prefix}indices"] = np.full_like(call[f"{prefix}indices"], -1)
        call = fill_unused(call, 0xFF, prefix)
    out, lse = run(call)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_6_lse_is_a_natural_logarithm_without_the_sink(implementation):
    for sink in (None, 0.0, 50.0, np.inf):
        more = {} if sink is None else {"attn_sink": np.full(2, sink, np.float32)}
        out, lse = run(one_key(implementation, **more))
        np.testing.assert_allclose(lse, 1.0, atol=FEW_OPERATIONS)
        share = 1.0 if sink is None else 1 / (1 + np.exp(sink - 1.0))
        np.testing.assert_allclose(
            out[..., 0].astype(float),
            share,
            rtol=TOLERANCES[jnp.dtype(jnp.bfloat16)].out,
            atol=1e-12,
        )


def test_6_duplicates_count_twice(implementation):
    call = one_key(implementation)
    out, lse = run(call | {"indices": np.zeros((1, 1, 5), np.int32)})
    np.testing.assert_allclose(lse, 1 + np.log(5), atol=FEW_OPERATIONS)
    assert (out[..., 0] == 1).all()


def test_7_one_executable_for_all_lengths(implementation):
    shape = Shape(batch=2, seqlen_q=1, heads=2, topk=2048, page_size=64)
    call = make_call(shape)
    traces = []

    @jax.jit
    def function(call, lengths):
        traces.append(1)
        return sparse_mla_decode(
            topk_length=lengths, return_lse=True, implementation=implementation, **call
        )

    for lengths in ([5, 64], [2048, 1]):
        lengths = np.array(lengths, np.int32)
        check(call | {"topk_length": lengths}, function(call, lengths))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "heads, format",
    [(4, "v32"), (8, "v32"), (16, "v32"), (32, "v32"), (8, "model1"), (16, "bf16")],
)
def test_8_heads_as_if_padded_to_64(heads, format, implementation):
    call = make_call(Shape(heads=64, format=format), implementation=implementation)
    call["attn_sink"] = np.linspace(-3, 3, 64).astype(np.float32)
    fewer = call | {"q": call["q"][:, :, :heads], "attn_sink": call["attn_sink"][:heads]}
    padded = run(call)
    check(fewer, tuple(x[:, :, :heads] for x in padded))
    check(fewer)


@pytest.mark.parametrize("topk", [1, 63, 65, 100, 256])
def test_9_number_of_listed_tokens(topk, implementation):
    shape = Shape(topk=topk, num_blocks=3, page_size=64)
    check(make_call(shape, implementation=implementation))


@pytest.mark.parametrize("format, dqk, token_bytes", [("v32", 576, 656), ("model1", 512, 584)])
def test_10_many_queries(format, dqk, token_bytes, implementation):
    """The reference gathers all keys, so here it is only traced."""

    def function(q, cache, indices):
        return sparse_mla_decode(q, cache, indices, return_lse=True, implementation=implementation)

    out, lse = jax.eval_shape(
        function,
        jax.ShapeDtypeStruct((1, 32768, 64, dqk), jnp.bfloat16),
        jax.ShapeDtypeStruct((512, 64, 1, token_bytes), jnp.uint8),
        jax.ShapeDtypeStruct((1, 32768, 2048), jnp.int32),
    )
    assert (out.shape, out.dtype) == ((1, 32768, 64, 512), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((1, 32768, 64), jnp.float32)


ZERO = {
    "no request": {"batch": 0},
    "no query": {"seqlen_q": 0},
    "no listed token": {"topk": 0},
    "no listed token but an extra one": {"topk": 0, "extra_topk": 3},
    "no extra one": {"extra_topk": 0},
    "no listed token in two caches": {"topk": 0, "extra_topk": 0},
    "no block": {"num_blocks": 0},
    "no block, and an extra cache": {"num_blocks": 0, "extra_topk": 3},
    "no extra block": {"extra_topk": 3, "extra_num_blocks": 0},
    "no slot in a block": {"page_size": 0},
}


@pytest.mark.parametrize("sizes", ZERO.values(), ids=ZERO)
@pytest.mark.parametrize("format, padded", [("v32", True), ("model1", False), ("bf16", False)])
def test_11_nothing(sizes, format, padded, implementation):
    if padded and "page_size" in sizes:
        pytest.skip("padded blocks have at least one slot")
    shape = Shape(format=format, padded=padded, **sizes)
    call = make_call(shape, implementation=implementation)
    rows = shape.batch * shape.seqlen_q
    call["attn_sink"] = np.array([0, np.inf, -np.inf, 3e38], np.float32)
    call["topk_length"] = np.full(shape.batch, 5, np.int32)
    out, lse = run(call)
    check(call, (out, lse))
    nothing = shape.topk == 0 or shape.num_blocks * shape.page_size == 0
    if nothing and not shape.extra_topk:
        assert lse.size == 4 * rows
        assert np.isneginf(lse).all()
        assert not out.any()


def test_11_nothing_is_computed_for_nothing():
    """The program of an empty call holds constants only; a full one multiplies matrices."""

    def program(**sizes):
        call = make_call(Shape(**sizes))
        return jax.jit(lambda call: sparse_mla_decode(**call)).lower(call).as_text()

    assert "dot_general" in program()
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"topk": 0}, {"topk": 0, "extra_topk": 0}):
        assert "dot_general" not in program(**sizes)


def test_all_6_transposed_and_sliced_operands(implementation):
    """Inside jit an operand may come in any layout; the operator asks for row-major."""
    call = make_call(Shape(heads=6, extra_topk=3), topk_length=np.array([6, 2], np.int32))
    call["attn_sink"] = np.arange(6, dtype=np.float32)

    def wrap(x):
        """Reversed axes, every second element of a longer last axis, an odd start."""
        wide = np.repeat(np.asarray(x), 2, axis=-1)
        return np.pad(wide, [(1, 0)] * x.ndim, constant_values=7).T

    def unwrap(x):
        return x.T[(slice(1, None),) * x.ndim][..., ::2]

    @jax.jit
    def function(wrapped):
        operands = {name: unwrap(x) for name, x in wrapped.items()}
        return sparse_mla_decode(return_lse=True, implementation=implementation, **operands)

    wrapped = {name: wrap(x) for name, x in call.items()}
    assert wrapped["q"].dtype == BF16
    check(call, function(wrapped))
