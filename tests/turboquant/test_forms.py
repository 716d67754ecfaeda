"""Every format, size and kind of batch against the oracle."""

import numpy as np
import pytest

from tests.turboquant.calls import (
    FREE,
    POISON,
    Shape,
    assert_same_bits,
    check,
    fill_unused,
    make_call,
    run,
)


@pytest.mark.parametrize("key_bits, value_bits, norm_correction", FREE)
@pytest.mark.parametrize("queries", [None, (2, 1, 4)], ids=["decode", "mixed"])
def test_formats(key_bits, value_bits, norm_correction, queries):
    bits = {"key_bits": key_bits, "value_bits": value_bits, "norm_correction": norm_correction}
    check(make_call(Shape(queries=queries, **bits)))


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("bits", [(3, 3), (4, 4), (3, 4), (8, 3)])
def test_head_sizes(head_dim, bits):
    shape = Shape(
        lengths=(5, 3),
        queries=(2, 1),
        head_dim=head_dim,
        kv_heads=1,
        heads=3,
        key_bits=bits[0],
        value_bits=bits[1],
    )
    check(make_call(shape))


@pytest.mark.parametrize("kv_heads, group", [(1, 1), (3, 1), (1, 5), (2, 8), (1, 64)])
def test_groups(kv_heads, group):
    check(
        make_call(Shape(lengths=(4, 3), queries=(2, 1), kv_heads=kv_heads, heads=kv_heads * group))
    )


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 64, 128])
def test_block_sizes(block_size):
    shape = Shape(lengths=(130, 1), queries=(3, 1), block_size=block_size, num_blocks=280, heads=2)
    check(make_call(shape))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype):
    check(make_call(Shape(dtype=dtype)))
    check(make_call(Shape(dtype=dtype, queries=None, key_bits=8)))


KINDS = {
    "decode": ((11, 5, 7), (1, 1, 1)),
    "verify": ((11, 5, 7), (4, 4, 4)),
    "chunked prefill": ((11, 5, 7), (6, 2, 7)),
    "full prefill": ((7, 5, 3), (7, 5, 3)),
    "mixed": ((11, 5, 3), (1, 5, 2)),
    "requests without tokens": ((11, 5, 7), (0, 3, 0)),
    "requests without cache": ((0, 5, 0), (2, 1, 1)),
    "more tokens than cache": ((2, 5), (4, 1)),
    "one request": ((9,), (9,)),
}


@pytest.mark.parametrize("spare", [(0, 0), (3, 2)], ids=["", "spare tokens"])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_batches(kind, spare):
    lengths, queries = KINDS[kind]
    check(make_call(Shape(lengths=lengths, queries=queries, spare=spare)))


@pytest.mark.parametrize("window", [1, 2, 3, 100])
@pytest.mark.parametrize("queries", [None, (2, 1, 4)])
def test_sliding_windows(window, queries):
    check(make_call(Shape(queries=queries), sliding_window=window))


def test_options_together():
    sinks = np.array([0.5, -np.inf, np.inf, 3e38, -3e38, 2.0], np.float32)
    options = {"sinks": sinks, "logits_soft_cap": 1.5, "softmax_scale": 0.4, "sliding_window": 4}
    check(make_call(Shape(), **options))
    check(make_call(Shape(queries=None, key_bits=8), **options))
    check(make_call(Shape(), **options | {"softmax_scale": np.array(-0.3, np.float32)}))


def test_the_default_scale():
    call = make_call(Shape())
    assert_same_bits(run(call), run(call | {"softmax_scale": 0.25}))


@pytest.mark.parametrize("bits", [(4, 4), (3, 3), (8, 4)])
def test_what_is_not_cached_never_changes_a_bit(bits):
    call = make_call(Shape(key_bits=bits[0], value_bits=bits[1], lengths=(11, 0, 4)))
    call["block_table"][0, 1] = 99  # a block that is not there
    results = [run(fill_unused(call, filler)) for filler in (0, POISON, 0x7F)]
    check(call, results[0])
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("block", [-1, 17, 2**31 - 1, -(2**31)])
def test_blocks_out_of_range_are_masked(block):
    call = make_call(Shape())
    call["block_table"][:, 1] = block
    check(call)


@pytest.mark.parametrize("length", [-1, -(2**31), 13, 2**31 - 1])
def test_lengths_are_clamped(length):
    call = make_call(Shape())
    call["seq_lens"][1] = length
    check(call)
    decode = make_call(Shape(queries=None))
    decode["seq_lens"][1] = length
    check(decode)


def test_bounds_that_are_too_low_are_hints_only():
    call = make_call(Shape())
    assert_same_bits(run(call | {"max_seq_len": 2, "max_query_len": 1}), run(call))
    decode = make_call(Shape(queries=None))
    assert_same_bits(run(decode | {"max_seq_len": 2, "max_query_len": 3}), run(decode))


def test_bounds_of_tokens_are_clamped():
    call = make_call(Shape())
    call["query_start_loc"] = np.array([-5, 2, 3, 7], np.int32)
    check(call)


@pytest.mark.parametrize(
    "shape, empty",
    [
        (Shape(lengths=(), queries=()), 0),
        (Shape(lengths=(), queries=(), spare=(2, 0)), 2),
        (Shape(lengths=(), queries=None), 0),
        (Shape(lengths=(3, 4), queries=(0, 0)), 0),
    ],
)
def test_nothing_to_do(shape, empty):
    out, lse = run(make_call(shape))
    assert (out.shape, lse.shape) == ((empty, 6, 16), (empty, 6))
    assert (out == 0).all() and np.isneginf(lse).all()


def test_no_blocks():
    call = make_call(Shape())
    for nothing in (
        {"kv_cache": call["kv_cache"][:0]},
        {"block_table": call["block_table"][:, :0]},
    ):
        out, lse = run(call | nothing)
        assert (out == 0).all() and np.isneginf(lse).all()
