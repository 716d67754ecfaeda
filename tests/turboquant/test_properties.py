"""Properties over random shapes, lengths, tables and sinks.

A new shape costs a compilation, so one property varies shapes and the others vary what is in
the arrays.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.turboquant.calls import (
    POISON,
    Shape,
    assert_same_as,
    assert_same_bits,
    check,
    fill_unused,
    make_call,
    run,
)

INT32 = np.iinfo(np.int32)
SEEDS = st.integers(0, 2**32 - 1)
CHEAP = settings.default.max_examples * 3  # examples that share their compilations
OUTSIDE = st.sampled_from([INT32.min, -1, 2**20, INT32.max])
SINKS = st.one_of(
    st.floats(-20, 20, width=32), st.sampled_from([np.inf, -np.inf, 3e38, -3e38, 89.0, -104.0])
)


@st.composite
def shapes(draw):
    lengths = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    queries = st.tuples(*[st.integers(0, 5)] * len(lengths))
    kv_heads = draw(st.integers(1, 3))
    return Shape(
        lengths=lengths,
        queries=draw(st.one_of(st.none(), queries)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=8 * draw(st.integers(1, 5)),
        block_size=draw(st.integers(1, 6)),
        num_blocks=36,
        key_bits=draw(st.sampled_from([3, 4, 8])),
        value_bits=draw(st.sampled_from([3, 4])),
        norm_correction=draw(st.booleans()),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
    )


@given(shapes(), SEEDS)
def test_any_shape(shape, seed):
    check(make_call(shape, seed))


def arrays(shape, elements, dtype):
    size = int(np.prod(shape))
    values = st.lists(elements, min_size=size, max_size=size)
    return values.map(lambda x: np.array(x, dtype).reshape(shape))


@settings(max_examples=CHEAP)
@given(
    arrays((3, 4), st.one_of(st.integers(0, 16), OUTSIDE), np.int32),
    arrays((3,), st.one_of(st.integers(-1, 13), OUTSIDE), np.int32),
    st.lists(st.integers(0, 7), min_size=4, max_size=4).map(sorted),
    arrays((6,), SINKS, np.float32),
    SEEDS,
)
def test_any_table_lengths_tokens_and_sinks(table, lengths, bounds, sinks, seed):
    call = make_call(Shape(), seed % 7, sinks=sinks)
    call |= {"block_table": table, "seq_lens": lengths}
    call["query_start_loc"] = np.array(bounds, np.int32)
    result = run(call)
    check(call, result)
    assert_same_bits(run(fill_unused(call, POISON)), result)


@settings(max_examples=CHEAP)
@given(arrays((3,), st.integers(0, 12), np.int32), st.permutations(range(3)), SEEDS)
def test_the_order_of_requests_does_not_matter(lengths, order, seed):
    call = make_call(Shape(queries=None), seed % 7)
    call["seq_lens"] = lengths
    shuffled = {name: call[name][order] for name in ("query", "block_table", "seq_lens")}
    out, lse = run(call)
    assert_same_as(run(call | shuffled), (out[order], lse[order]))


@settings(max_examples=CHEAP)
@given(st.integers(1, 12), SEEDS)
def test_where_blocks_lie_does_not_matter(length, seed):
    call = make_call(Shape(queries=None), seed % 7)
    call["seq_lens"] = np.full(3, length, np.int32)
    order = np.random.default_rng(seed).permutation(17)
    moved = {"kv_cache": call["kv_cache"][order]}
    moved["block_table"] = np.argsort(order)[call["block_table"]].astype(np.int32)
    assert_same_bits(run(call | moved), run(call))
