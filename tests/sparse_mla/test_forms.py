"""Every form of a call against the oracle: formats, sizes, pages, lengths, sinks, both caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import mla_schedule, sparse_mla_decode
from tests.pairwise import covering_rows
from tests.sparse_mla.calls import FORMATS, Shape, check, make_call, run, shape_of
from tests.sparse_mla.oracle import E4M3

EXTREMES = np.array([np.inf, -np.inf, 3e38, -3e38, 0.0, 89.0, -104.0, 1e30], np.float32)

PARAMETERS = {
    "batch": [1, 3],
    "seqlen_q": [1, 2],
    "heads": [1, 8, 16, 64, 128],
    "topk": [1, 64, 100, 576],
    "cache": ["v32", "v32 padded", "model1", "model1 padded", "bf16 576", "bf16 512"],
    "page_size": [1, 3, 64],
    "sink": [None, "normal", "extreme"],
    "lengths": [None, "of requests", "of tokens"],
    "extra": [None, 1, 70],
    "extra_page_size": [2, 5],
    "scale": [None, 0.07, "traced"],
}
ROWS = covering_rows(PARAMETERS)


def call_of(row):
    """A call with masked and repeated indices."""
    shape = shape_of(row)
    call = make_call(shape)
    rng = np.random.default_rng(1)
    lead = (row["batch"], row["seqlen_q"])
    for prefix, topk in (("", row["topk"]), ("extra_", row["extra"])):
        if topk is None:
            continue
        indices = call[f"{prefix}indices"]
        outside = rng.choice([-1, 2**31 - 1, -(2**31), indices.max() + 10**6], indices.shape)
        call[f"{prefix}indices"] = np.where(
            rng.random(indices.shape) < 0.15, outside.astype(np.int32), indices
        )
        if row["lengths"]:
            sizes = lead[:1] if row["lengths"] == "of requests" else lead
            call[f"{prefix}topk_length"] = rng.integers(-1, topk + 2, sizes).astype(np.int32)
    if row["sink"]:
        sink = rng.standard_normal(row["heads"]).astype(np.float32)
        call["attn_sink"] = sink if row["sink"] == "normal" else np.resize(EXTREMES, sink.shape)
    if row["scale"]:
        traced = row["scale"] == "traced"
        call["softmax_scale"] = np.array(0.05, np.float32) if traced else row["scale"]
    return call


@pytest.mark.parametrize("row", ROWS, ids=["-".join(map(str, row.values())) for row in ROWS])
def test_pairwise(row):
    check(call_of(row))


@pytest.mark.parametrize("format", FORMATS)
def test_everything_at_once(format):
    call = make_call(
        Shape(format=format, padded=format != "bf16", extra_topk=4),
        topk_length=np.array([[7, 0, 3], [1, 2, 99]], np.int32),
        extra_topk_length=np.array([2, 0], np.int32),
        attn_sink=np.array([0.5, -2, 3, 0], np.float32),
        softmax_scale=np.array(0.1, np.float32),
    )
    check(call)


@pytest.mark.parametrize("dtype", [np.int8, E4M3])
@pytest.mark.parametrize("format", ["v32", "model1"])
@pytest.mark.parametrize("padded", [False, True])
def test_other_dtypes_of_a_byte(format, dtype, padded):
    call = make_call(Shape(format=format, padded=padded, extra_topk=3))
    want = run(call)
    for name in ("kv_cache", "extra_kv_cache"):
        call[name] = call[name].view(dtype)
    for got, other in zip(run(call), want, strict=True):
        np.testing.assert_array_equal(got, other)


@pytest.mark.parametrize(
    "scale",
    [2, np.float32(0.07), np.array(0.03, np.float32), jnp.asarray(0.05, jnp.bfloat16)],
    ids=["int", "numpy scalar", "0-d array", "0-d bf16"],
)
def test_softmax_scale(scale):
    call = make_call(Shape(), softmax_scale=scale)
    # Smaller queries: a logit's rounding is in proportion to it.
    check(call | {"q": call["q"] * np.array(1 / 32, call["q"].dtype)})


@pytest.mark.parametrize("sink", EXTREMES, ids=str)
def test_extreme_sinks_beside_an_empty_row(sink):
    """+inf gives 0, -inf changes nothing, and no sink makes NaN of a row with nothing valid."""
    call = make_call(Shape(), topk_length=np.array([7, 0], np.int32))
    without = run(call)
    out, lse = run(call | {"attn_sink": np.full(4, sink, np.float32)})
    check(call | {"attn_sink": np.full(4, sink, np.float32)}, (out, lse))
    np.testing.assert_array_equal(lse, without[1])
    assert not out[1].any()
    if sink == np.inf:
        assert not out.any()
    if sink == -np.inf:
        np.testing.assert_array_equal(out, without[0])


def test_large_logits_do_not_overflow():
    call = make_call(Shape(format="bf16"))
    call["q"] = call["q"] * np.array(128, call["q"].dtype)
    out, lse = run(call)
    assert np.isfinite(out).all()
    assert lse.max() > 300


def test_a_schedule_changes_nothing_whatever_it_was_made_for():
    lengths = np.array([7, 2], np.int32)
    call = make_call(Shape(extra_topk=4), topk_length=lengths)
    sizes = {"batch": 2, "seqlen_q": 3, "num_heads": 4, "topk": 7, "extra_topk": 4}
    for made_for in (None, lengths, np.zeros(2, np.int32)):
        for num_parts in (None, 1):
            schedule = mla_schedule(made_for, num_parts=num_parts, **sizes)
            check(call | {"schedule": schedule})


def test_without_lse_the_output_is_the_same():
    call = make_call(Shape())
    np.testing.assert_array_equal(jax.jit(sparse_mla_decode)(**call), run(call)[0])


def test_same_call_same_bits():
    call = make_call(Shape(extra_topk=4))
    for first, again in zip(run(call), run(call), strict=True):
        np.testing.assert_array_equal(first, again)
