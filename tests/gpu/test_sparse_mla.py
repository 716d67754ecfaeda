"""`sparse_mla_decode`'s kernels against the float32 reference, over a pairwise covering set.

Keys are a sixteenth in size at most: where large parts of two keys cancel, what is left of their
rounding to bf16, and of their weights', is within the tolerances' absolute part. At twice the size
it was not in two rows, by a model of that rounding alone.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import SparseMlaPlan, mla_schedule, pack_mla_cache, sparse_mla_decode
from jax_beam_attn.sparse_mla import api
from jax_beam_attn.sparse_mla.reference import sparse_mla_reference
from tests.pairwise import covering_rows
from tests.sparse_mla import calls
from tests.sparse_mla.calls import Shape, assert_same_bits, fill_unused
from tests.sparse_mla.oracle import BF16, TOKEN_BYTES

# Those of the cases whose expected numbers are exact, run here with the kernels.
from tests.sparse_mla.test_cases import (
    test_1_a_scale_that_is_no_power_of_two,  # noqa: F401
    test_5_every_index_masked,  # noqa: F401
    test_6_duplicates_count_twice,  # noqa: F401
    test_6_lse_is_a_natural_logarithm_without_the_sink,  # noqa: F401
)
from tests.tolerances import (
    LARGE_LOGIT_ROUNDING,
    MLA,
    MLA_ROUNDED_KEYS,
    assert_mla_out_close,
)

IMPLEMENTATIONS = ("triton",)
EXTREME = np.array([-np.inf, np.inf, -3e38, 3e38, 0.0], np.float32)
KEY_SIZE = 1 / 32
# Tokens that the reference attends to at a time: it holds all their keys in float32.
REFERENCE_TOKENS = 250_000

PARAMETERS = {
    "batch": [1, 4, 74, 321],
    "seqlen_q": [1, 2, 3],
    "heads": [1, 8, 16, 64, 128],
    "topk": [1, 64, 100, 576, 2048],
    "cache": ["v32", "v32 padded", "v32 powers", "model1", "model1 padded", "bf16 576", "bf16 512"],
    "page_size": [1, 61, 64],
    "sink": [None, "normal", "extreme"],
    "lengths": [None, "of requests", "of tokens"],
    "extra": [None, 1, 130],
    "extra_page_size": [2, 37],
    "bad_indices": [False, True],
    "scale": [None, "traced", "negative"],
    "splits": [None, "schedule", "schedule of other lengths", 1, 3],
    "queries": ["normal", "large"],
}
ROWS = covering_rows(PARAMETERS, at_least=320)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return request.param


def make_call(row, seed):
    """The call that a row describes; whatever a result may not depend on is NaN."""
    rng = np.random.default_rng(seed)
    form = row["cache"].partition(" ")[2]
    shape = calls.shape_of(
        row, tokens=500, extra_num_blocks=1 + 100 // row["extra_page_size"], key_size=KEY_SIZE
    )
    call = calls.make_call(shape, seed)
    if row["queries"] == "large":  # few keys take all the weight
        call["q"] = call["q"] * np.array(16, BF16)
    for prefix, topk in (("", row["topk"]), ("extra_", row["extra"])):
        if topk is None:
            continue
        if form == "powers":
            call[f"{prefix}kv_cache"] = powers_of_two(call[f"{prefix}kv_cache"])
        indices = call[f"{prefix}indices"]
        if row["bad_indices"]:
            outside = rng.choice([-1, 2**31 - 1, -(2**31), 10**6], indices.shape)
            indices = np.where(rng.random(indices.shape) < 0.15, outside, indices)
        call[f"{prefix}indices"] = indices.astype(np.int32)
        if row["lengths"]:
            sizes = indices.shape[: 1 if row["lengths"] == "of requests" else 2]
            length = rng.integers(-1, topk + 2, sizes)
            length[0] = 0
            call[f"{prefix}topk_length"] = length.astype(np.int32)
        call = fill_unused(call, calls.POISON, prefix)
    if row["sink"]:
        sinks = {"normal": rng.standard_normal(row["heads"]), "extreme": EXTREME}
        call["attn_sink"] = np.resize(sinks[row["sink"]], row["heads"]).astype(np.float32)
    if row["scale"]:
        call["softmax_scale"] = np.array(-0.04 if row["scale"] == "negative" else 0.04, np.float32)
    return call


def powers_of_two(cache):
    """A v32 cache with scales rounded to powers of two."""
    cache = cache.copy()
    scales = np.ascontiguousarray(cache[..., 512:528]).view(np.float32)
    cache[..., 512:528] = np.exp2(np.round(np.log2(scales))).astype(np.float32).view(np.uint8)
    return cache


def schedule_for(call, lengths="its own"):
    batch, seqlen_q, heads, _ = call["q"].shape
    names = ("topk_length", "extra_topk_length") if "extra_indices" in call else ("topk_length",)
    made_for = {name: call.get(name) for name in names}
    if lengths == "others":
        made_for = dict.fromkeys(names, np.resize(np.int32([0, 65, 900]), batch))
    return mla_schedule(
        **made_for,
        batch=batch,
        seqlen_q=seqlen_q,
        num_heads=heads,
        topk=call["indices"].shape[2],
        extra_topk=call["extra_indices"].shape[2] if "extra_indices" in call else 0,
    )


@functools.cache
def _reference(static):
    def run(operands, static, **_):
        operands = {name: array for name, array in operands.items() if array is not None}
        return sparse_mla_reference(operands | {"q": operands["q"].astype(jnp.float32)}, static)

    def function(**call):
        with mock.patch.object(api, "sparse_mla", run):
            return api.sparse_mla_decode(return_lse=True, **call, **dict(static))

    return jax.jit(function)


def reference(call):
    """The float32 result, a few requests at a time."""
    static = tuple((name, call[name]) for name in ("page_size", "extra_page_size") if name in call)
    dropped = ("implementation", "plan", "schedule", *dict(static))
    arrays = {name: x for name, x in call.items() if name not in dropped}
    by_request = [n for n in arrays if n == "q" or n.endswith(("indices", "topk_length"))]
    batch, seqlen_q = call["q"].shape[:2]
    keys = sum(call[n].shape[2] for n in ("indices", "extra_indices") if n in call)
    step = max(1, REFERENCE_TOKENS // (seqlen_q * max(keys, 1)))
    results = []
    with jax.default_matmul_precision("highest"):
        for first in range(0, batch, step):
            part = {name: arrays[name][first : first + step] for name in by_request}
            results.append(jax.device_get(_reference(static)(**arrays | part)))
    return tuple(np.concatenate(parts) for parts in zip(*results, strict=True))


def check(result, call, want=None, powers=False):
    """Requires (out, lse) to be that of the reference; `powers`: v32 scales are powers of two."""
    want = reference(call) if want is None else want
    (out, lse), (want_out, want_lse) = result, want
    assert_mla_out_close(out, want_out)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    full = ~np.isneginf(want_lse)
    v32 = call["q"].shape[-1] == 576 and call["kv_cache"].dtype != BF16
    tolerance = MLA_ROUNDED_KEYS if v32 and not powers else MLA
    # Logits of tens are rounded in proportion to their size.
    limit = tolerance.lse + LARGE_LOGIT_ROUNDING * np.abs(want_lse[full])
    assert np.all(np.abs(lse[full] - want_lse[full]) <= limit)


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_covering_set(index, implementation):
    row = ROWS[index]
    call = make_call(row, index) | {"implementation": implementation}
    if isinstance(row["splits"], int):
        call["plan"] = SparseMlaPlan(num_splits=row["splits"])
    elif row["splits"]:
        call["schedule"] = schedule_for(call, "others" if "other" in row["splits"] else "its own")
    first = calls.run(call)
    assert_same_bits(calls.run(call), first)
    check(first, call, powers=row["cache"] == "v32 powers")


@pytest.mark.parametrize("block_h", [16, 32, 64])
@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("cache", ["v32", "model1", "bf16 576"])
def test_every_tile(cache, block_h, block_n, implementation):
    row = dict.fromkeys(PARAMETERS) | {"batch": 3, "seqlen_q": 2, "heads": 72, "topk": 300}
    row |= {"cache": cache, "page_size": 61, "extra": 70, "extra_page_size": 37}
    call = make_call(row, 0) | {"implementation": implementation}
    want = reference(call)
    for num_warps, width in ((4, 512), (8, 128)) if block_h < 64 else ((8, 128), (8, 512)):
        plan = SparseMlaPlan(
            block_h=block_h, block_n=block_n, num_warps=num_warps, num_stages=1, width=width
        )
        check(calls.run(call | {"plan": plan}), call, want)


@pytest.mark.parametrize("format", calls.FORMATS)
def test_what_is_not_attended_to_changes_no_bit(format, implementation):
    """Cases 3 and 4: slot 0 behind masked entries, tokens past the lengths, pages' tails."""
    shape = Shape(4, 2, 20, 150, format, 61, 9, format != "bf16", 40, 5, 20, key_size=KEY_SIZE)
    call = calls.make_call(shape, implementation=implementation)
    for prefix in ("", "extra_"):
        indices = np.maximum(call[f"{prefix}indices"], 1)
        indices[..., ::3] = -1
        call[f"{prefix}indices"] = indices
    call["topk_length"] = np.array([0, 1, 70, 150], np.int32)
    call["extra_topk_length"] = np.array([[40, 0], [3, 7], [0, 0], [41, -1]], np.int32)
    results = [
        calls.run(fill_unused(fill_unused(call, filler), filler, "extra_"))
        for filler in (calls.POISON, 0x00, 0x42)
    ]
    check(results[0], call)
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("format", calls.FORMATS)
def test_2_an_index_past_the_end_is_as_minus_one(format, implementation):
    shape = Shape(format=format, topk=100, extra_topk=4, key_size=KEY_SIZE)
    call = calls.make_call(shape, implementation=implementation)
    call["indices"][..., 1] = call["extra_indices"][..., 1] = -1
    masked = calls.run(call)
    check(masked, call)
    for slot in (12, 13, 2**31 - 1, -(2**31), -2):
        other = {n: np.where(call[n] == -1, np.int32(slot), call[n]) for n in call if "ind" in n}
        assert_same_bits(calls.run(call | other), masked)


def test_7_one_executable_for_all_lengths(implementation):
    call = calls.make_call(Shape(2, 1, 2, 2048, page_size=64, key_size=KEY_SIZE))
    traces = []

    @jax.jit
    def function(call, lengths):
        traces.append(1)
        return sparse_mla_decode(
            topk_length=lengths, return_lse=True, implementation=implementation, **call
        )

    for lengths in ([5, 64], [2048, 1], [0, 2048]):
        lengths = np.array(lengths, np.int32)
        check(jax.device_get(function(call, lengths)), call | {"topk_length": lengths})
    assert len(traces) == 1


@pytest.mark.parametrize("format", calls.FORMATS)
def test_8_heads_as_if_padded_to_64(format, implementation):
    shape = Shape(heads=64, format=format, topk=90, key_size=KEY_SIZE)
    call = calls.make_call(shape, implementation=implementation)
    call["attn_sink"] = np.linspace(-3, 3, 64).astype(np.float32)
    want = reference(call)
    for heads in (4, 8, 16, 32, 64):
        fewer = call | {"q": call["q"][:, :, :heads], "attn_sink": call["attn_sink"][:heads]}
        check(calls.run(fewer), fewer, tuple(x[:, :, :heads] for x in want))


@pytest.mark.parametrize("topk", [0, 1, 63, 65, 100, 256])
def test_9_number_of_listed_tokens(topk, implementation):
    shape = Shape(topk=topk, num_blocks=3, page_size=64, extra_topk=3, key_size=KEY_SIZE)
    call = calls.make_call(shape, implementation=implementation)
    check(calls.run(call), call)


def test_10_many_queries(implementation):
    """32768 queries of 64 heads, in 512 equal runs of 64."""
    call = calls.make_call(Shape(1, 64, 64, 64, "model1", 64, 8, key_size=KEY_SIZE))

    @jax.jit
    def function(q, indices, cache):
        q, indices = (jnp.tile(x, (1, 512, *(1,) * (x.ndim - 2))) for x in (q, indices))
        out, lse = sparse_mla_decode(
            q, cache, indices, return_lse=True, implementation=implementation
        )
        runs = out.reshape(512, *call["q"].shape[1:])
        return jnp.all(runs == runs[:1]), out[:, -64:], lse[:, -64:]

    same, *last = jax.device_get(function(call["q"], call["indices"], call["kv_cache"]))
    assert same
    check(last, call)


@pytest.mark.parametrize("format", calls.FORMATS)
@pytest.mark.parametrize(
    "sizes", [{"topk": 0, "extra_topk": 3}, {"num_blocks": 0}, {"num_blocks": 0, "extra_topk": 3}]
)
def test_11_nothing(sizes, format, implementation):
    call = calls.make_call(Shape(format=format, key_size=KEY_SIZE, **sizes))
    call |= {"implementation": implementation, "topk_length": np.array([5, 0], np.int32)}
    check(calls.run(call), call)


@pytest.mark.parametrize("mapped", [["q"], ["kv_cache", "indices"], ["topk_length", "attn_sink"]])
def test_vmap(mapped, implementation):
    """Whatever is mapped, and with a schedule for each call; the loop is the judge."""
    sizes = {"batch": 2, "seqlen_q": 2, "heads": 6, "topk": 100, "extra_topk": 5}
    made = [calls.make_call(Shape(**sizes, key_size=KEY_SIZE), seed) for seed in range(3)]
    for seed, call in enumerate(made):
        call["topk_length"] = np.array([50 * seed, 99], np.int32)
        call["attn_sink"] = np.arange(6, dtype=np.float32) - seed
    made = [{n: call[n] if n in mapped else made[0][n] for n in call} for call in made]
    operands = {n: np.stack([c[n] for c in made]) if n in mapped else made[0][n] for n in made[0]}
    axes = {name: 0 if name in mapped else None for name in operands}

    def function(call):
        return sparse_mla_decode(
            return_lse=True, implementation=implementation, schedule=schedule_for(call), **call
        )

    out, lse = jax.device_get(jax.jit(jax.vmap(function, in_axes=(axes,)))(operands))
    for n, call in enumerate(made):
        check((out[n], lse[n]), call)


@pytest.mark.parametrize(
    "format, num_blocks, page_size",
    [("v32", 60_000, 64), ("model1", 65_000, 64), ("bf16", 60_000, 64), ("v32", 1, 3_600_000)],
    ids=["v32", "model1", "bf16", "one block"],
)
def test_a_cache_past_2_to_the_31_bytes(format, num_blocks, page_size, implementation):
    """Tokens at the end of the cache, beyond 32-bit offsets."""
    small = calls.make_call(
        Shape(format=format, topk=50, num_blocks=1, page_size=64, key_size=KEY_SIZE)
    )
    cache = small["kv_cache"]
    dtype = jnp.bfloat16 if format == "bf16" else jnp.uint8
    if num_blocks == 1:  # the last 64 tokens of the block
        big = jnp.zeros((1, page_size, 1, cache.shape[3]), dtype)
        start, first = (0, page_size - 64, 0, 0), page_size - 64
    else:
        big = jnp.zeros((num_blocks, page_size, 1, cache.shape[3]), dtype)
        start, first = (num_blocks - 1, 0, 0, 0), (num_blocks - 1) * page_size
    write = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0)
    big = write(big, jnp.asarray(cache), start)
    assert big.nbytes > 2**31
    function = jax.jit(
        functools.partial(sparse_mla_decode, return_lse=True, implementation=implementation)
    )
    got = function(small["q"], big, small["indices"] + first)
    check(jax.device_get(got), small)


@pytest.mark.parametrize("format", ["v32", "model1"])
def test_a_layer_in_a_scan_with_a_donated_cache(format, implementation):
    """The schedule of a step, shared by layers, in one program with the cache's rows."""
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((3, 5, 64, 1, {"v32": 576, "model1": 512}[format])) / 8
    caches = jnp.stack([pack_mla_cache(jnp.asarray(k, jnp.float32), format) for k in keys])
    assert caches.shape[-1] == TOKEN_BYTES[format]
    call = calls.make_call(Shape(4, 1, 16, 200, format, page_size=64, num_blocks=5))
    lengths = np.array([200, 0, 64, 131], np.int32)

    @jax.jit
    def layers(q, indices, caches):
        schedule = mla_schedule(lengths, batch=4, seqlen_q=1, num_heads=16, topk=200)
        return jax.lax.map(
            lambda cache: sparse_mla_decode(
                q, cache, indices, topk_length=lengths, schedule=schedule, return_lse=True,
                implementation=implementation,
            ),
            caches,
        )  # fmt: skip

    out, lse = jax.device_get(layers(call["q"], call["indices"], caches))
    for n in range(3):
        one = call | {"kv_cache": np.asarray(caches[n]), "topk_length": lengths}
        check((out[n], lse[n]), one)
