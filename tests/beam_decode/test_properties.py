"""Properties over random shapes, lengths, masks and sinks.

A new shape costs a compilation, so one property varies shapes and the others vary what is in
the arrays.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.beam_decode.calls import (
    Shape,
    assert_same_as,
    assert_same_bits,
    check,
    dense_call,
    fill_unused,
    jagged,
    paged,
    run,
)
from tests.tolerances import REORDERED

INT32 = np.iinfo(np.int32)
SEEDS = st.integers(0, 2**32 - 1)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16"])
CHEAP = settings.default.max_examples * 5  # examples that share their compilations

# What stands on both sides of a valid number, near and far.
OUTSIDE = st.sampled_from([INT32.min, INT32.min + 1, -(2**20), -1, 2**20, INT32.max])
SINKS = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([np.inf, -np.inf, 3e38, -3e38, 1e30, -1e30, 0.0, 89.0, -104.0]),
)


def int_arrays(shape, low, high):
    """Arrays of small integers, some far outside [low, high]."""
    size = int(np.prod(shape))
    values = st.lists(st.one_of(st.integers(low, high), OUTSIDE), min_size=size, max_size=size)
    return values.map(lambda x: np.array(x, np.int32).reshape(shape))


def sinks(heads):
    values = st.lists(SINKS, min_size=heads, max_size=heads)
    return values.map(lambda x: np.array(x, np.float32))


@st.composite
def shapes(draw):
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return Shape(
        batch=draw(st.integers(0, 3)),
        width=draw(st.integers(0, 11)),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 5)),
        context=draw(st.integers(0, 9)),
        beam_rows=draw(st.integers(0, 9)),
        steps=draw(st.integers(0, 5)),
        index_heads=draw(st.sampled_from([1, kv_heads, kv_heads * group])),
    )


@st.composite
def calls(draw, shape, dtype="float32"):
    """Dense calls of a shape, with every array of integers drawn."""
    call = dense_call(shape, dtype, draw(SEEDS))
    call["topk_indices"] = draw(
        int_arrays(call["topk_indices"].shape, -1, shape.beam_rows)
        if shape.steps * shape.width * shape.batch <= 40
        else st.just(call["topk_indices"])
    )
    call["decode_nums"] = draw(int_arrays((shape.batch,), -1, shape.steps + 1))
    call["seqused_k"] = draw(int_arrays((shape.batch,), -1, shape.context + 1))
    call["attn_sink"] = draw(sinks(shape.heads))
    return call


@given(st.data())
def test_any_shape(data):
    shape, dtype = data.draw(shapes()), data.draw(DTYPES)
    call = data.draw(calls(shape, dtype))
    for optional in ("attn_sink", "seqused_k"):
        if data.draw(st.booleans(), f"without {optional}"):
            call.pop(optional)
    if data.draw(st.booleans(), "decode_nums for all"):
        call["decode_nums"] = data.draw(st.integers(-1, shape.steps + 1))
    call["logits_soft_cap"] = data.draw(st.sampled_from([None, None, 0.7, 20]))
    call["softmax_scale"] = data.draw(st.sampled_from([None, 0.25, np.array(0.7, np.float32)]))
    page_size = data.draw(st.integers(1, 6))
    form = data.draw(st.sampled_from([dict, jagged, lambda call: paged(call, page_size)]))
    check(form(call))


FIXED = Shape(batch=3, width=2, heads=4, kv_heads=2, context=5, beam_rows=4, steps=3)


@settings(max_examples=CHEAP)
@given(calls(FIXED))
def test_any_content_dense(call):
    check(call)


@settings(max_examples=CHEAP)
@given(calls(FIXED), st.data())
def test_any_content_jagged(call, data):
    call = jagged(call, filler=1.0)
    bounds = int_arrays((4,), -1, len(call["k_context"]) + 1)
    call["cu_seqlens_k"] = data.draw(st.one_of(bounds, bounds.map(np.sort)))
    check(call)


@settings(max_examples=CHEAP)
@given(calls(FIXED), st.data())
def test_any_content_paged(call, data):
    lengths = call["seqused_k"]
    call = paged(call, page_size=3, filler=1.0) | {"seqused_k": lengths}
    pages = len(call["k_context"])
    call["block_tables"] = data.draw(int_arrays(call["block_tables"].shape, -1, pages))
    check(call)


@settings(max_examples=CHEAP)
@given(calls(FIXED), st.sampled_from([1, 3, 4]), SEEDS)
def test_all_forms_of_a_context_agree(call, page_size, seed):
    dense = run(call)
    assert_same_as(run(jagged(call)), dense, REORDERED)
    assert_same_as(run(paged(call, page_size, seed)), dense, REORDERED)


@settings(max_examples=CHEAP)
@given(calls(FIXED, "bfloat16"), st.sampled_from([np.nan, np.inf, -np.inf, 3e38]), SEEDS)
def test_unused_memory_never_changes_a_bit(call, filler, seed):
    for form in (
        lambda filler: fill_unused(call, filler),
        lambda filler: jagged(fill_unused(call, filler), filler),
        lambda filler: paged(fill_unused(call, filler), 3, seed, filler),
    ):
        assert_same_bits(run(form(filler)), run(form(0.0)))


@settings(max_examples=CHEAP)
@given(calls(FIXED, "bfloat16"), st.data())
def test_unused_indices_never_change_a_bit(call, data):
    """Block tables past the length, and topk_indices past decode_nums."""
    call = paged(call, page_size=2, filler=1.0)
    other = dict(call)
    pages = data.draw(int_arrays(call["block_tables"].shape, -1, len(call["k_context"])))
    used_pages = np.arange(pages.shape[1]) * 2 < call["seqused_k"][:, None]
    other["block_tables"] = np.where(used_pages, call["block_tables"], pages)
    rows = data.draw(int_arrays(call["topk_indices"].shape, -1, FIXED.beam_rows))
    used_rows = np.arange(FIXED.steps)[:, None] < call["decode_nums"][:, None, None, None, None]
    other["topk_indices"] = np.where(used_rows, call["topk_indices"], rows)
    assert_same_bits(run(other), run(call))
