"""TurboQuant's kernels against the float32 reference, over a pairwise covering set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import (
    TurboQuantFormat,
    TurboQuantPlan,
    hadamard_rotation,
    lloyd_max_centroids,
    turboquant_decode_attention,
    turboquant_dequantize,
    turboquant_store,
)
from tests.pairwise import covering_rows
from tests.tolerances import (
    LARGE_LOGIT_ROUNDING,
    TURBOQUANT_CODES,
    TURBOQUANT_LSE,
    TURBOQUANT_OUT,
    relative_frobenius,
)
from tests.turboquant import calls, oracle

IMPLEMENTATIONS = ("triton",)

PARAMETERS = {
    "dtype": ["bfloat16", "bfloat16", "float16", "float32"],
    "bits": [(8, 4), (4, 4), (3, 4), (3, 3), (4, 3), (8, 3)],
    "norm_correction": [False, True],
    "head_dim": [64, 80, 96, 128, 256],
    "kv_heads": [1, 2, 3],
    "group": [1, 2, 4, 7, 8, 16, 64],
    "context": [1, 15, 16, 1000, 8192],
    "requests": [1, 2, 5],
    "kind": ["decode", "decode", "verify", "chunked", "prefill", "mixed"],
    "block_size": [8, 16, 16, 64, 128],
    "num_splits": [None, 1, 2, 16, 32],
    "swapped, rotation": [
        *[(None, None), (None, "separate"), (True, "fused"), (True, "separate")],
        *[(False, None), (False, "separate")],
    ],
    "dequantize": [None, False, True],
    "sink": [None, "normal", "extreme"],
    "soft_cap": [None, 3.0],
    "window": [None, None, 1, 100],
    "scale": [None, 0.3, "traced"],
    "max_seq_len": ["exact", None, "too low"],
    "bad_blocks": [False, True],
}
ROWS = covering_rows(PARAMETERS, at_least=320)
EXTREME = [-np.inf, np.inf, -3e38, 3e38]


def queries_of(kind, lengths, rng):
    """New tokens of each request."""
    if kind == "decode":
        return None
    if kind == "verify":
        return tuple(4 for _ in lengths)
    most = {"chunked": 70, "prefill": 1000, "mixed": 40}[kind]
    full = [min(length, most) for length in lengths]
    if kind == "mixed":
        return tuple(int(rng.choice([0, 1, n])) for n in full)
    return tuple(full)


def make_call(row: dict, seed: int) -> dict:
    """The call that a row describes; every byte that it may not depend on is 0xFF."""
    rng = np.random.default_rng(seed)
    lengths = [row["context"], 0, *rng.integers(0, row["context"] + 1, 3).tolist()]
    lengths = tuple(lengths[: row["requests"]])
    queries = queries_of(row["kind"], lengths, rng)
    heads = row["kv_heads"] * row["group"]
    shape = calls.Shape(
        lengths=lengths,
        queries=queries,
        spare=(0, 0) if queries is None else (1, 2),
        heads=heads,
        kv_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        block_size=row["block_size"],
        num_blocks=row["requests"] * -(-row["context"] // row["block_size"]) + 1,
        key_bits=row["bits"][0],
        value_bits=row["bits"][1],
        norm_correction=row["norm_correction"],
        dtype=row["dtype"],
    )
    call = calls.make_call(shape, seed)
    if row["bad_blocks"]:
        bad = rng.choice([-1, shape.num_blocks, 2**31 - 1, -(2**31)], call["block_table"].shape)
        use = rng.random(bad.shape) < 0.2
        call["block_table"] = np.where(use, bad, call["block_table"]).astype(np.int32)
    if row["sink"]:
        sinks = {"normal": rng.standard_normal(heads), "extreme": rng.choice(EXTREME, heads)}
        call["sinks"] = sinks[row["sink"]].astype(np.float32)
    if row["soft_cap"]:
        call["logits_soft_cap"] = row["soft_cap"]
    if row["window"]:
        call["sliding_window"] = row["window"]
    if row["scale"]:
        call["softmax_scale"] = np.array(0.08, np.float32) if row["scale"] == "traced" else 0.1
    if row["max_seq_len"]:
        call["max_seq_len"] = row["context"] if row["max_seq_len"] == "exact" else 5
    if queries is not None:
        call["max_query_len"] = max(queries)
    return calls.fill_unused(call, calls.POISON)


def run(call, implementation, plan=None, repeat=1):
    """(out, lse) of a jitted call; with repeat, of each of several runs."""
    call = call | {"implementation": implementation, "plan": plan}
    arrays = {n: x if x is None else jnp.asarray(x) for n, x in calls.arrays_of(call).items()}
    for name in ("implementation", "plan"):
        arrays.pop(name, None)
    function = jax.jit(functools.partial(calls.function_of(call)))
    results = [jax.device_get(function(**arrays)) for _ in range(repeat)]
    return results if repeat > 1 else results[0]


def reference(call):
    return run(call | {"query": call["query"].astype(np.float32)}, "reference")


def check(got, want, dtype):
    assert got[0].dtype == dtype
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    finite = np.isfinite(want[1])
    assert (got[0][~finite] == 0).all()
    rounding = LARGE_LOGIT_ROUNDING * np.abs(want[1][finite])
    assert np.all(np.abs(got[1][finite] - want[1][finite]) <= TURBOQUANT_LSE + rounding)
    error = relative_frobenius(got[0], want[0])
    limit = TURBOQUANT_OUT[jnp.dtype(dtype)]
    assert error <= limit, f"error {error:.2e}, allowed {limit:.2e}"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("index", range(len(ROWS)))
def test_covering_set(index, implementation):
    row = ROWS[index]
    call = make_call(row, index)
    plan = TurboQuantPlan(
        num_splits=row["num_splits"],
        rotation=row["swapped, rotation"][1],
        swapped=row["swapped, rotation"][0],
        dequantize=row["dequantize"],
    )
    first, second = run(call, implementation, plan, repeat=2)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)  # bitwise: the same call gives the same bits
    check(first, reference(call), call["query"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("num_warps", [4, 8])
@pytest.mark.parametrize("block_n", [32, 64, 128])
@pytest.mark.parametrize("block_m", [8, 16, 64, 128])
def test_every_tile(block_m, block_n, num_warps, swapped, implementation):
    shape = calls.Shape(
        lengths=(700, 77),
        queries=(9, 40),
        heads=8,
        head_dim=128,
        block_size=16,
        num_blocks=90,
        dtype="bfloat16",
    )
    call = calls.fill_unused(calls.make_call(shape), calls.POISON)
    plan = TurboQuantPlan(
        block_m=block_m, block_n=block_n, num_warps=num_warps, swapped=swapped, num_splits=3
    )
    check(run(call, implementation, plan), reference(call), call["query"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("preset", calls.PRESETS)
@pytest.mark.parametrize("dequantize", [False, True])
def test_prefill(preset, dequantize, implementation):
    """Whole prompts of several tiles, and later chunks of some."""
    format = TurboQuantFormat.preset(preset, head_dim=128, num_kv_heads=2, block_size=16)
    shape = calls.Shape(
        lengths=(2000, 700, 1500, 0),
        queries=(2000, 700, 300, 0),
        heads=8,
        head_dim=128,
        block_size=16,
        num_blocks=4 * 125,
        key_bits=format.key_bits,
        value_bits=format.value_bits,
        dtype="bfloat16",
    )
    call = calls.fill_unused(calls.make_call(shape), calls.POISON) | {"max_query_len": 2000}
    plan = TurboQuantPlan(dequantize=dequantize)
    check(run(call, implementation, plan), reference(call), call["query"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("preset", calls.PRESETS)
def test_long_and_many(preset, implementation):
    """131072 tokens of one request, and 64 requests; plans chosen."""
    for requests, context in ((1, 131072), (64, 4096)):
        format = TurboQuantFormat.preset(preset, head_dim=128, num_kv_heads=8, block_size=16)
        blocks = requests * context // 16
        rng = np.random.default_rng(0)
        some = calls.random_cache(format, 512)
        call = {
            "query": rng.standard_normal((requests, 32, 128)).astype(jnp.bfloat16),
            "kv_cache": some[np.arange(blocks) % 512],
            "block_table": rng.permutation(blocks).reshape(requests, -1).astype(np.int32),
            "seq_lens": rng.integers(context // 2, context + 1, requests).astype(np.int32),
            "format": format,
            **calls.codebook(format),
        }
        check(run(call, implementation), reference(call), jnp.bfloat16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_shares_the_cache(implementation):
    call = calls.make_call(calls.Shape(head_dim=64, dtype="bfloat16", block_size=8))
    arrays = calls.arrays_of(call)
    mapped = {n: np.stack([arrays[n], arrays[n][::-1]]) for n in ("query", "block_table")}
    mapped["rotation"] = np.stack([calls.random_rotation(64, seed) for seed in range(2)])
    axes = {n: 0 if n in mapped else None for n in arrays}
    function = calls.function_of(call | {"implementation": implementation})
    got = jax.jit(jax.vmap(lambda a: function(**a), in_axes=(axes,)))(arrays | mapped)
    for i in range(2):
        one = call | {n: x[i] for n, x in mapped.items()}
        check([np.asarray(g[i]) for g in got], reference(one), jnp.bfloat16)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cache_past_2_to_the_31_bytes(implementation):
    """Case 8: the last block is written and read at its place."""
    format = TurboQuantFormat.preset("4bit_nc", head_dim=128, num_kv_heads=8, block_size=16)
    num_blocks = 64 * 32768 // 16
    assert num_blocks * format.block_bytes > 2**31
    book = {"rotation": hadamard_rotation(128), "centroids": lloyd_max_centroids(4, 128)}
    key, value = jax.random.normal(jax.random.key(0), (2, 100, 8, 128), jnp.bfloat16)
    last = num_blocks - 7  # the block of the first of 100 tokens
    store = jax.jit(functools.partial(turboquant_store, format=format, **book), donate_argnums=0)
    cache = store(
        jnp.zeros(format.cache_shape(num_blocks), jnp.uint8),
        key,
        value,
        last * 16 + jnp.arange(100),
    )
    small = store(jnp.zeros(format.cache_shape(7), jnp.uint8), key, value, jnp.arange(100))
    np.testing.assert_array_equal(cache[last:], small)
    assert not cache[:7].any() and not cache[num_blocks // 2 : num_blocks // 2 + 7].any()

    query = jax.random.normal(jax.random.key(1), (1, 32, 128), jnp.bfloat16)
    attend = functools.partial(turboquant_decode_attention, format=format, return_lse=True, **book)
    table, lengths = jnp.arange(last, num_blocks)[None], jnp.array([100])
    got = jax.jit(functools.partial(attend, implementation=implementation))(
        query, cache, table, lengths
    )
    want = jax.jit(functools.partial(attend, implementation="reference"))(
        query.astype(jnp.float32), small, table - last, lengths
    )
    check(jax.device_get(got), jax.device_get(want), jnp.bfloat16)


@pytest.mark.parametrize("key_bits, value_bits, norm_correction", calls.FREE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_store_writes_the_codes_of_a_cpu(key_bits, value_bits, norm_correction, dtype):
    """Those at a midpoint may be their neighbours, and no more than 1 in 10,000."""
    format = TurboQuantFormat(128, 8, 16, key_bits, value_bits, norm_correction)
    book = calls.codebook(format)
    rng = np.random.default_rng(0)
    key, value = rng.standard_normal((2, 500, 8, 128)).astype(jnp.dtype(dtype))
    slots = rng.permutation(640)[:500].astype(np.int32)
    slots[::50] = -1
    function = functools.partial(turboquant_store, format=format, **book)
    cache = np.full(format.cache_shape(40), calls.POISON, np.uint8)
    got = np.asarray(jax.jit(function)(cache, key, value, slots))
    with jax.default_device(jax.devices("cpu")[0]):
        want = np.asarray(jax.jit(function)(cache, key, value, slots))
    data = [x.reshape(40, -1)[:, : format.metadata_start].reshape(-1) for x in (got, want)]
    size = format.key_bytes + format.value_bytes
    rows = [x.reshape(-1, size) for x in data]
    parts = [(0, format.key_bytes, key_bits), (format.key_bytes, size, value_bits)]
    for first, end, bits in parts:
        a, b = (np.ascontiguousarray(x[:, first:end]).reshape(-1) for x in rows)
        if bits == 8:
            np.testing.assert_array_equal(a, b)
            continue
        a, b = (np.array(oracle.codes_of(x.tobytes(), bits)) for x in (a, b))
        assert np.abs(a - b).max() <= 1
        assert (a != b).mean() < TURBOQUANT_CODES
    of_got, of_want = (
        turboquant_dequantize(x, format=format, centroids=book["centroids"]) for x in (got, want)
    )
    for a, b in zip(of_got, of_want, strict=True):
        written = slots[slots >= 0]
        a, b = (np.asarray(x).reshape(640, 8, 128)[written] for x in (a, b))
        assert relative_frobenius(a, b) < 1e-2


@pytest.mark.parametrize("preset", calls.PRESETS)
def test_a_decode_loop(preset):
    """Store and attend in scan, kernels against the reference on the same cache."""
    format = TurboQuantFormat.preset(preset, head_dim=128, num_kv_heads=2, block_size=16)
    book = calls.codebook(format)
    table = np.array([[5, 1, 3], [0, 4, 2]], np.int32)
    key, value = jax.random.normal(jax.random.key(0), (2, 40, 2, 2, 128), jnp.bfloat16)
    query = jax.random.normal(jax.random.key(1), (40, 2, 8, 128), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def decode(cache, inputs):
        def step(carry, x):
            cache, t = carry
            q, k, v = x
            slots = jnp.asarray(table)[:, t // 16] * 16 + t % 16
            cache = turboquant_store(cache, k, v, slots, format=format, **book)
            results = [
                turboquant_decode_attention(
                    q.astype(dtype),
                    cache,
                    table,
                    jnp.full(2, t + 1),
                    format=format,
                    return_lse=True,
                    implementation=name,
                    **book,
                )
                for name, dtype in (("triton", q.dtype), ("reference", jnp.float32))
            ]
            return (cache, t + 1), results

        return jax.lax.scan(step, (cache, jnp.int32(0)), inputs)[1]

    cache = jnp.full(format.cache_shape(6), calls.POISON, jnp.uint8)
    got, want = jax.device_get(decode(cache, (query, key, value)))
    check(got, want, jnp.bfloat16)


def test_the_kernel_is_the_default():
    call = calls.make_call(calls.Shape(dtype="bfloat16", head_dim=64))
    arrays = {n: jnp.asarray(x) for n, x in calls.arrays_of(call).items()}
    lowered = jax.jit(calls.function_of(call)).lower(**arrays)
    assert "triton_kernel_call" in lowered.as_text()
