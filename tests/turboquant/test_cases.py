"""Cases of public bug reports, restated; see shared/cases. Numbers are theirs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import TurboQuantFormat, turboquant_dequantize, turboquant_store
from tests.turboquant import oracle
from tests.turboquant.calls import (
    POISON,
    Shape,
    arrays_of,
    assert_same_as,
    assert_same_bits,
    check,
    codebook,
    expected,
    fill_unused,
    function_of,
    make_call,
    run,
)


@pytest.mark.parametrize("key_bits", [3, 4])
@pytest.mark.parametrize("nc", [False, True])
def test_1_key_norm_past_16_bits(key_bits, nc):
    format = TurboQuantFormat(128, 1, 16, key_bits, 4, nc)
    rng = np.random.default_rng(0)
    key = (rng.standard_normal((3, 1, 128)) * 6000).astype(np.float32)
    assert (np.linalg.norm(key, axis=-1) > 65504).any()
    book = codebook(format)
    cache = turboquant_store(
        jnp.zeros(format.cache_shape(1), jnp.uint8), key, key, np.arange(3), format=format, **book
    )
    k, v = turboquant_dequantize(cache, format=format, centroids=book["centroids"])
    assert np.isfinite(k).all() and np.isfinite(v).all()
    stored = np.linalg.norm(k[0, :3], axis=-1)
    assert (stored < 1.2 * 65504).all() and (stored > 0.8 * 65504).any()


def test_2_a_request_of_length_0():
    call = make_call(Shape(queries=None))
    full = run(call)
    call["seq_lens"] = np.array([11, 0, 7], np.int32)
    out, lse = run(call)
    assert (out[1] == 0).all() and np.isneginf(lse[1]).all()
    assert_same_bits((out[::2], lse[::2]), (full[0][::2], full[1][::2]))


@pytest.mark.parametrize("bits", [(3, 3), (4, 4), (8, 4)])
def test_3_poison_past_the_length(bits):
    call = make_call(Shape(key_bits=bits[0], value_bits=bits[1], block_size=16, num_blocks=5))
    assert_same_bits(run(fill_unused(call, POISON)), run(fill_unused(call, 0)))


def test_4_speculated_tokens_of_a_long_request():
    """Four new tokens of 500 cached ones; the same executable with other lengths."""
    shape = Shape(lengths=(500,), queries=(4,), block_size=16, num_blocks=32, heads=2)
    call = make_call(shape)
    step = jax.jit(functools.partial(function_of(call)))
    for length in (500, 497, 4, 3, 512):
        call["seq_lens"] = np.array([length], np.int32)
        check(call, step(**arrays_of(call)))
    # Row t alone, as a decode call that sees seq_len - q_len + t + 1 keys.
    call["seq_lens"] = np.array([500], np.int32)
    out, lse = step(**arrays_of(call))
    for t in range(4):
        alone = {n: x for n, x in call.items() if n != "query_start_loc"}
        alone |= {"query": call["query"][t : t + 1], "seq_lens": np.array([497 + t], np.int32)}
        assert_same_as((out[t : t + 1], lse[t : t + 1]), run(alone))


@pytest.mark.parametrize("head_dim", [80, 96])
def test_5_head_sizes_that_are_no_power_of_two(head_dim):
    from jax_beam_attn import hadamard_rotation

    call = make_call(Shape(head_dim=head_dim, heads=2, lengths=(4, 2), queries=(2, 1)))
    check(call | {"rotation": np.asarray(hadamard_rotation(head_dim))})


@pytest.mark.parametrize("key_bits", [3, 4])
@pytest.mark.parametrize("value_bits", [3, 4])
def test_6_bits_as_a_plain_decoder_reads_them(key_bits, value_bits):
    format = TurboQuantFormat(24, 1, 4, key_bits, value_bits, False)
    rng = np.random.default_rng(0)
    cache = np.zeros(format.cache_shape(1), np.uint8)
    flat = cache.reshape(-1)
    codes = [rng.integers(0, 2**bits, 24) for bits in (key_bits, value_bits)]
    data, metadata = oracle.places(format, 2, 0)
    row = oracle.bytes_of(codes[0], key_bits) + oracle.bytes_of(codes[1], value_bits)
    flat[data : data + len(row)] = np.frombuffer(row, np.uint8)
    for byte, number in zip(metadata, (2.0, 0.5, -1.0), strict=True):
        flat[byte : byte + 2] = np.array([number], "<f2").view(np.uint8)
    centroids = np.arange(2**key_bits, dtype=np.float32)
    k, v = turboquant_dequantize(cache, format=format, centroids=centroids)
    np.testing.assert_array_equal(k[0, 2, 0], codes[0] * 2.0)
    np.testing.assert_array_equal(v[0, 2, 0], codes[1] * 0.5 - 1.0)


def test_7_sinks():
    call = make_call(Shape())
    with_none = call | {"sinks": np.full(6, -np.inf, np.float32)}
    assert_same_as(run(with_none), run(call))
    sinks = np.arange(6, dtype=np.float32)
    out, lse = run(call | {"sinks": sinks})
    plain_out, plain_lse = expected(call)
    share = 1 / (1 + np.exp(sinks - plain_lse))
    assert_same_as((out, lse), (plain_out * share[..., None], plain_lse))


def test_9_a_slot_of_minus_1_writes_nothing():
    format = Shape().format
    cache = np.full(format.cache_shape(3), POISON, np.uint8)
    tokens = np.ones((2, 2, 16), np.float32)
    got = turboquant_store(
        cache, tokens, tokens, np.array([-1, -1]), format=format, **codebook(format)
    )
    np.testing.assert_array_equal(got, cache)
