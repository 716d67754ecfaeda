"""The logic of the Triton kernels on small shapes, against the oracle in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import TurboQuantPlan
from jax_beam_attn.turboquant import api
from tests.interpreted.concrete import arguments, put_kernels_in_place
from tests.pairwise import covering_rows
from tests.tolerances import TURBOQUANT_LSE, TURBOQUANT_OUT, relative_frobenius
from tests.turboquant import calls

KINDS = {
    "decode": ((40, 7, 0), None),
    "verify": ((40, 20, 3), (4, 4, 4)),
    "chunked": ((40, 33, 17), (20, 9, 17)),
    "mixed": ((40, 7, 21), (1, 0, 21)),
    "more tokens than cache": ((3, 0, 5), (6, 2, 5)),
}
PARAMETERS = {
    "kind": list(KINDS),
    "dtype": ["float32", "float16", "bfloat16"],
    "head_dim": [16, 32, 40, 64, 96],  # with and without codes in whole words
    "bits": [(3, 3), (4, 4), (8, 4), (3, 4), (4, 3), (8, 3)],
    "norm_correction": [False, True],
    "group": [1, 3, 8],
    "block_size": [3, 8, 16, 32],
    "block_n": [16, 32],
    "block_m": [None, 8, 32],
    "swapped": [False, True],
    "rotation": ["fused", "separate"],
    "dequantize": [False, True],
    "num_splits": [1, 2, 5],
    "max_seq_len": [None, 5],
    "spare": [(0, 0), (3, 2)],
    "sink": [False, True],
    "soft_cap": [None, 2.0],
    "window": [None, 1, 18],
    "scale": [0.3, "traced"],
}
ROWS = covering_rows(PARAMETERS, at_least=64)


def run_kernels(call, plan, monkeypatch):
    """(out, lse) of a call."""
    put_kernels_in_place(monkeypatch, api, "turboquant")
    decode = "query_start_loc" not in call
    function = api.turboquant_decode_attention if decode else api.turboquant_attention
    return function(**arguments(call), return_lse=True, plan=plan)


def check(got, call):
    out, lse = (np.asarray(x) for x in got)
    want_out, want_lse = calls.expected(call)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=0, atol=TURBOQUANT_LSE)
    assert relative_frobenius(out, want_out) <= TURBOQUANT_OUT[jnp.dtype(out.dtype)]
    assert (out[~finite] == 0).all()


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_against_the_oracle(index, monkeypatch):
    row = ROWS[index]
    rng = np.random.default_rng(index)
    lengths, queries = KINDS[row["kind"]]
    heads = 2 * row["group"]
    shape = calls.Shape(
        lengths=lengths,
        queries=queries,
        spare=row["spare"] if queries else (0, 0),
        heads=heads,
        kv_heads=2,
        head_dim=row["head_dim"],
        block_size=row["block_size"],
        num_blocks=3 * (40 // row["block_size"] + 1),
        key_bits=row["bits"][0],
        value_bits=row["bits"][1],
        norm_correction=row["norm_correction"],
        dtype=row["dtype"],
    )
    call = calls.make_call(shape, index)
    call["block_table"][0, -1] = rng.choice([-1, 99, call["block_table"][0, -1]])
    if row["sink"]:
        call["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if row["soft_cap"]:
        call["logits_soft_cap"] = row["soft_cap"]
    if row["window"]:
        call["sliding_window"] = row["window"]
    call["softmax_scale"] = jnp.float32(-0.2) if row["scale"] == "traced" else row["scale"]
    call = calls.fill_unused(call, calls.POISON) | {"max_seq_len": row["max_seq_len"]}
    plan = TurboQuantPlan(
        num_splits=row["num_splits"],
        block_m=row["block_m"],
        block_n=row["block_n"],
        swapped=row["swapped"],
        rotation=row["rotation"],
        dequantize=row["dequantize"],
    )
    got = run_kernels(call, plan, monkeypatch)
    check(got, call | {"softmax_scale": float(call["softmax_scale"])})


@pytest.mark.parametrize("block_n", [32, 128])
def test_dequantized_tiles_end_with_a_request(block_n, monkeypatch):
    """The dequantised tokens behind a request's length are NaN until they are written."""
    shape = calls.Shape(lengths=(5, 130, 70), heads=4, kv_heads=2, num_blocks=132, dtype="float16")
    call = calls.fill_unused(calls.make_call(shape), calls.POISON)
    plan = TurboQuantPlan(dequantize=True, block_n=block_n, num_splits=1)
    check(run_kernels(call, plan, monkeypatch), call)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_wide_tiles(dequantize, dtype, monkeypatch):
    """Queries of wide tiles are rotated before."""
    shape = calls.Shape(
        lengths=(40, 20), queries=(30, 9), heads=6, kv_heads=2, num_blocks=28, dtype=dtype
    )
    call = calls.fill_unused(calls.make_call(shape), calls.POISON)
    plan = TurboQuantPlan(block_m=64, block_n=32, dequantize=dequantize)
    check(run_kernels(call, plan, monkeypatch), call)
