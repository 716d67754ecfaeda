"""The logic of the Triton kernels on small shapes, against the oracle in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import BeamDecodePlan
from jax_beam_attn.beam_decode import api
from tests.beam_decode import calls
from tests.interpreted.concrete import arguments, put_kernels_in_place
from tests.pairwise import covering_rows
from tests.tolerances import KERNEL_LSE, KERNEL_OUT, relative_frobenius

PARAMETERS = {
    "gpu": ["a100", "h200"],  # without and with the tensor memory accelerator
    "form": ["dense", "lengths", "jagged", "paged 16", "paged 7"],
    "dtype": ["float32", "float16"],
    "head_dim": [16, 24],
    "width": [1, 3, 17],
    "group": [1, 3],
    "context": [0, 15, 40],
    "steps": [0, 3],
    "num_splits": [1, 2, 5],
    "pipeline": ["fused", "3kernel"],
    "index_heads": ["one", "kv", "query"],
    "sink": [False, True],
    "soft_cap": [None, 2.0],
    "scale": [0.3, "traced"],
}
# With nothing to attend to no kernel is launched.
ROWS = [row for row in covering_rows(PARAMETERS, at_least=64) if row["context"] or row["steps"]]
# No context at all, where it would come by the tensor memory accelerator.
ROWS += [
    ROWS[0]
    | {"gpu": "h200", "dtype": "float16", "head_dim": 16, "context": 0, "steps": 3}
    | {"form": form, "pipeline": pipeline}
    for form in ("dense", "jagged")
    for pipeline in ("fused", "3kernel")
]


def run_kernels(call, gpu, plan, monkeypatch):
    """(out, lse) of a call."""
    put_kernels_in_place(monkeypatch, api, "beam_decode", gpu=gpu)
    return api.beam_decode_attn(**arguments(call), return_lse=True, plan=plan)


def check(got, call):
    out, lse = got
    want_out, want_lse = calls.expected(call)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=0, atol=KERNEL_LSE)
    assert relative_frobenius(out, want_out) <= KERNEL_OUT[jnp.dtype(out.dtype)]


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_against_the_oracle(index, monkeypatch):
    row = ROWS[index]
    rng = np.random.default_rng(index)
    heads = 2 * row["group"]
    shape = calls.Shape(
        batch=2,
        width=row["width"],
        heads=heads,
        kv_heads=2,
        head_dim=row["head_dim"],
        context=row["context"],
        beam_rows=row["steps"] * row["width"] + 1,
        steps=row["steps"],
        index_heads={"one": 1, "kv": 2, "query": heads}[row["index_heads"]],
    )
    call = calls.dense_call(shape, row["dtype"], index)
    call["topk_indices"] -= rng.random(call["topk_indices"].shape) < 0.2  # some are -1
    call["decode_nums"] = np.array([row["steps"], row["steps"] // 2], np.int32)
    if row["form"] != "dense":
        call["seqused_k"] = rng.integers(0, row["context"] + 1, 2).astype(np.int32)
    if row["sink"]:
        call["attn_sink"] = rng.standard_normal(heads).astype(np.float32)
    if row["soft_cap"]:
        call["logits_soft_cap"] = row["soft_cap"]
    traced = row["scale"] == "traced"
    call["softmax_scale"] = jnp.float32(0.2) if traced else row["scale"]
    call = calls.fill_unused(call, np.nan)
    if row["form"] == "jagged":
        call = calls.jagged(call)
    elif row["form"].startswith("paged"):
        call = calls.paged(call, int(row["form"].split()[1]), index)

    plan = BeamDecodePlan(
        pipeline=row["pipeline"], num_splits=row["num_splits"], block_m=16, block_n=16
    )
    got = run_kernels(call, row["gpu"], plan, monkeypatch)
    check(got, call | {"softmax_scale": float(call["softmax_scale"])})


@pytest.mark.parametrize("pipeline", ["fused", "3kernel"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_pool_without_pages(num_splits, pipeline, monkeypatch):
    """Every page is masked, and there is nothing to point a descriptor at."""
    call = calls.dense_call(calls.Shape(2, 3, 4, 2, 16, 40, 10, 3), "float16")
    call["k_context"] = call["v_context"] = np.zeros((0, 16, 2, 16), np.float16)
    call |= {"block_tables": np.zeros((2, 3), np.int32), "seqused_k": np.array([40, 3], np.int32)}
    plan = BeamDecodePlan(pipeline=pipeline, num_splits=num_splits, block_n=16)
    check(run_kernels(call, "h200", plan, monkeypatch), call)


@pytest.mark.parametrize("bounds", [[0, 40, 0, 40, 0], [40, 0, 40, 0, 40], [0, 40, 40, 40, 40]])
@pytest.mark.parametrize("pipeline", ["fused", "3kernel"])
def test_bounds_out_of_order(bounds, pipeline, monkeypatch):
    """Samples then share tokens, and want more slots than there are tokens for."""
    shape = calls.Shape(4, 3, 4, 2, 16, 10, 10, 3)
    call = calls.dense_call(shape, "float16")
    for name in ("k_context", "v_context"):
        call[name] = call[name].reshape(40, 2, 16)
    call["cu_seqlens_k"] = np.array(bounds, np.int32)
    plan = BeamDecodePlan(pipeline=pipeline, num_splits=32, block_m=16, block_n=16)
    check(run_kernels(call, "h200", plan, monkeypatch), call)


@pytest.mark.parametrize("soft_cap", [1e2, 1e4, 1e8])
def test_a_large_soft_cap_leaves_logits_alone(soft_cap, monkeypatch):
    call = calls.dense_call(calls.Shape(1, 3, 4, 2, 16, 40, 10, 3), "float32")
    call["logits_soft_cap"] = soft_cap
    check(run_kernels(call, "a100", BeamDecodePlan(block_n=16), monkeypatch), call)
