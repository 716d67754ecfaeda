"""`beam_decode_attn`'s kernels against the float32 reference, over a pairwise covering set."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import BeamDecodePlan, beam_decode_attn
from tests.beam_decode import calls
from tests.pairwise import covering_rows
from tests.tolerances import (
    KERNEL_LSE,
    KERNEL_OUT,
    LARGE_LOGIT_ROUNDING_GPU,
    relative_frobenius,
)

IMPLEMENTATIONS = ("triton", "cute")

PARAMETERS = {
    "dtype": ["bfloat16", "bfloat16", "float16", "float32"],
    "form": ["dense", "lengths", "jagged", "paged 64", "paged 16", "paged 7"],
    "head_dim": [128, 128, 64, 96, 192, 256, 40],
    "width": [1, 2, 4, 7, 10, 17, 64, 128, 257],
    "kv_heads": [1, 2, 3],
    "group": [1, 2, 3, 4, 8, 16],
    "batch": [1, 2, 5, 33],
    "context": [0, 1, 16, 65, 129, 500, 1000],
    "steps": [0, 1, 3, 8, 16],
    "decoded": ["all", "none", "some", "per sample"],
    "index_heads": ["one", "kv", "query"],
    "bad_indices": [False, True],
    "sink": [None, "normal", "extreme"],
    "soft_cap": [None, 3.0],
    "scale": [None, 0.3, "traced"],
    "num_splits": [None, 1, 2, 7, 32],
    "pipeline": [None, "fused", "3kernel"],
    "scores": ["normal", "very negative"],
}
# What the Hopper kernel leaves to the Triton kernels is not among its rows.
HOPPER_PARAMETERS = PARAMETERS | {
    "dtype": ["bfloat16", "float16"],
    "form": ["dense", "lengths", "jagged", "paged 64", "paged 128"],
    "pipeline": [None, "fused"],
}
ROWS = {
    "triton": covering_rows(PARAMETERS, at_least=320),
    "cute": covering_rows(HOPPER_PARAMETERS, at_least=320),
}


def make_call(row: dict, seed: int) -> dict:
    """The call that a row describes; whatever a result may not depend on is NaN."""
    rng = np.random.default_rng(seed)
    # Bounds the test's time, not what is supported: tests of single large sizes are below.
    width = min(row["width"], max(1, 60_000 // (row["batch"] * row["group"] * row["kv_heads"] * 8)))
    heads = row["kv_heads"] * row["group"]
    shape = calls.Shape(
        batch=row["batch"],
        width=width,
        heads=heads,
        kv_heads=row["kv_heads"],
        head_dim=row["head_dim"],
        context=row["context"],
        beam_rows=row["steps"] * width + 1,
        steps=row["steps"],
        index_heads={"one": 1, "kv": row["kv_heads"], "query": heads}[row["index_heads"]],
    )
    call = calls.dense_call(shape, row["dtype"], seed)
    call["decode_nums"] = {
        "all": np.int32(row["steps"]),
        "none": np.int32(0),
        "some": np.int32(row["steps"] // 2),
        "per sample": rng.integers(-1, row["steps"] + 2, row["batch"]).astype(np.int32),
    }[row["decoded"]]
    if row["bad_indices"]:
        bad = rng.choice([-1, shape.beam_rows, 2**31 - 1, -(2**31)], call["topk_indices"].shape)
        use = rng.random(bad.shape) < 0.3
        call["topk_indices"] = np.where(use, bad, call["topk_indices"]).astype(np.int32)
    if row["scores"] == "very negative":
        # q.k of thousands, all negative: a maximum that starts at 0 or -1e4 would drop them.
        call["q"] = (abs(call["q"]) * 8).astype(call["q"].dtype)
        for name in ("k_context", "k_beam"):
            call[name] = (-abs(call[name]) * 8).astype(call[name].dtype)
    if row["sink"]:
        sinks = {"normal": rng.standard_normal(heads), "extreme": rng.choice(EXTREME, heads)}
        call["attn_sink"] = sinks[row["sink"]].astype(np.float32)
    if row["soft_cap"]:
        call["logits_soft_cap"] = row["soft_cap"]
    if row["scale"]:
        call["softmax_scale"] = np.array(0.2, np.float32) if row["scale"] == "traced" else 0.3
    if row["form"] != "dense":
        lengths = rng.integers(-1, row["context"] + 2, row["batch"])
        lengths[:2] = (0, row["context"])[: row["batch"]]
        call["seqused_k"] = lengths.astype(np.int32)
    call = calls.fill_unused(call, np.nan)
    if row["form"] == "jagged":
        call = calls.jagged(call)
    elif row["form"].startswith("paged"):
        call = calls.paged(call, int(row["form"].split()[1]), seed)
    return call


EXTREME = [-np.inf, np.inf, -3e38, 3e38]


def run(call, implementation, plan=None, repeat=1):
    """(out, lse) of a jitted call; with repeat, of each of several runs."""
    static = {n: x for n, x in call.items() if not hasattr(x, "shape")}
    arrays = {n: jnp.asarray(x) for n, x in call.items() if hasattr(x, "shape")}
    function = jax.jit(
        functools.partial(
            beam_decode_attn, return_lse=True, implementation=implementation, plan=plan, **static
        )
    )
    results = [jax.device_get(function(**arrays)) for _ in range(repeat)]
    return results if repeat > 1 else results[0]


def reference(call):
    exact = {n: x.astype(np.float32) if n in (*calls.CACHES, "q") else x for n, x in call.items()}
    return run(exact, "reference")


def check(got, want, dtype):
    assert got[0].dtype == dtype
    np.testing.assert_array_equal(np.isneginf(got[1]), np.isneginf(want[1]))
    finite = np.isfinite(want[1])
    # Logits of thousands are rounded by more than these limits, and a weight's relative error is
    # its logit's absolute one.
    rounding = LARGE_LOGIT_ROUNDING_GPU * np.abs(want[1][finite])
    assert np.all(np.abs(got[1][finite] - want[1][finite]) <= KERNEL_LSE + rounding)
    error = relative_frobenius(got[0], want[0])
    limit = KERNEL_OUT[jnp.dtype(dtype)] + np.max(rounding, initial=0.0)
    assert error <= limit, f"error {error:.2e}, allowed {limit:.2e}"


@pytest.mark.parametrize(
    "implementation, index", [(name, i) for name, rows in ROWS.items() for i in range(len(rows))]
)
def test_covering_set(implementation, index):
    row = ROWS[implementation][index]
    call = make_call(row, index)
    plan = BeamDecodePlan(pipeline=row["pipeline"], num_splits=row["num_splits"])
    first, second = run(call, implementation, plan, repeat=2)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)  # bitwise: the same call gives the same bits
    check(first, reference(call), call["q"].dtype)


TILES = [("triton", m, n) for m in (16, 32, 64, 128) for n in (32, 64, 128)]
TILES += [("cute", m, n) for m in (64, 128) for n in (64, 128)]


@pytest.mark.parametrize("implementation, block_m, block_n", TILES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_tile(implementation, block_m, block_n, dtype):
    shape = calls.Shape(2, 40, 8, 2, 128, 700, 41 * 5, 5, 2)
    call = calls.fill_unused(
        calls.dense_call(shape, dtype, seqused_k=np.array([650, 77], np.int32)), np.nan
    )
    plan = BeamDecodePlan(block_m=block_m, block_n=block_n, num_splits=3)
    check(run(call, implementation, plan), reference(call), call["q"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "shape",
    [
        calls.Shape(1, 2048, 4, 2, 128, 1500, 2048 * 2, 2, 1),
        calls.Shape(1, 3, 64, 1, 128, 5000, 12, 4, 1),
        calls.Shape(300, 2, 4, 2, 64, 333, 4, 2, 1),
        calls.Shape(1, 8, 64, 8, 128, 32768, 8 * 16, 16, 8),
    ],
    ids=["W=2048", "G=64", "B=300", "long"],
)
@pytest.mark.parametrize("ragged", [False, True])
def test_large_sizes(shape, ragged, implementation):
    call = calls.dense_call(shape, "bfloat16")
    if ragged:
        rng = np.random.default_rng(0)
        call["seqused_k"] = rng.integers(0, shape.context + 1, shape.batch).astype(np.int32)
    check(run(call, implementation), reference(call), call["q"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bounds_out_of_order(implementation):
    """Samples then share tokens, and want more slots than there are tokens for."""
    shape = calls.Shape(64, 2, 4, 2, 64, 100, 4, 2, 1)
    call = calls.dense_call(shape, "bfloat16")
    for name in ("k_context", "v_context"):
        call[name] = call[name].reshape(6400, 2, 64)
    call["cu_seqlens_k"] = np.array([0, 6400] * 32 + [0], np.int32)
    plan = BeamDecodePlan(num_splits=32)
    check(run(call, implementation, plan), reference(call), call["q"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("soft_cap", [1e2, 1e4, 1e8])
def test_a_large_soft_cap_leaves_logits_alone(soft_cap, implementation):
    call = calls.dense_call(calls.Shape(2, 40, 8, 2, 128, 700, 41 * 5, 5, 2), "bfloat16")
    call["logits_soft_cap"] = soft_cap
    check(run(call, implementation), reference(call), call["q"].dtype)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("block_n", [64, 128])
def test_stages_and_clusters_of_the_hopper_kernel(block_n, num_stages):
    call = calls.dense_call(calls.Shape(2, 100, 6, 2, 128, 700, 101 * 5, 5, 2), "bfloat16")
    plan = BeamDecodePlan(num_splits=2, block_m=128, block_n=block_n, num_stages=num_stages)
    check(run(call, "cute", plan), reference(call), call["q"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_shares_the_context(implementation):
    shape = calls.Shape(2, 4, 4, 2, 64, 300, 12, 3, 1)
    call = calls.dense_call(shape, "bfloat16")
    arrays = {n: jnp.asarray(x) for n, x in call.items()}
    mapped = {n: jnp.stack([arrays[n], arrays[n][..., ::-1]]) for n in ("q", "topk_indices")}
    axes = {n: 0 if n in mapped else None for n in arrays}
    function = functools.partial(beam_decode_attn, return_lse=True, implementation=implementation)
    got = jax.jit(jax.vmap(lambda a: function(**a), in_axes=(axes,)))(arrays | mapped)
    for i in range(2):
        one = call | {n: np.asarray(x[i]) for n, x in mapped.items()}
        check([np.asarray(g[i]) for g in got], reference(one), call["q"].dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_cache_past_2_to_the_31_elements(implementation):
    """Case 11: the last sample's rows lie beyond 32-bit offsets."""
    batch, context, heads, head_dim = 3, 2**21, 4, 128  # 2**30 elements a sample
    key = jax.random.key(0)
    k = jax.random.normal(key, (batch, context, heads, head_dim), jnp.bfloat16)
    q = jax.random.normal(key, (batch, 1, 2, heads, head_dim), jnp.bfloat16)
    nothing = jnp.zeros((batch, 0, heads, head_dim), jnp.bfloat16)
    indices = jnp.zeros((batch, 1, 1, 0, 2), jnp.int32)
    lengths = jnp.array([context, 5, 7], jnp.int32)
    function = functools.partial(beam_decode_attn, return_lse=True)
    got = jax.jit(functools.partial(function, implementation=implementation))(
        q, k, k, nothing, nothing, indices, 0, seqused_k=lengths
    )
    tail = (a[2:] for a in (q, k[:, :8], k[:, :8], nothing, nothing, indices))
    want = jax.jit(functools.partial(function, implementation="reference"))(
        *(a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in tail),
        0,
        seqused_k=lengths[2:],
    )
    check([np.asarray(g[2:]) for g in got], [np.asarray(w) for w in want], jnp.bfloat16)
