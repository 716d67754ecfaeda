"""The logic of the sparse MLA kernels on small shapes, against the oracle in float64.

Queries are float32 here, for the interpreter's bf16 products are wrong; what is stored in bf16
and e4m3 is so here too.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn import SparseMlaPlan, mla_schedule
from jax_beam_attn.sparse_mla import api
from tests.interpreted.concrete import arguments, put_kernels_in_place
from tests.pairwise import covering_rows
from tests.sparse_mla import calls
from tests.sparse_mla.oracle import BF16
from tests.tolerances import KERNEL_LSE, KERNEL_OUT, relative_frobenius

EXTREME = [-np.inf, np.inf, -3e38, 3e38]
PARAMETERS = {
    "gpu": ["a100", "h200"],  # e4m3 by integers and by conversion
    "cache": ["v32", "v32 padded", "model1", "model1 padded", "bf16 576", "bf16 512"],
    "batch": [1, 3],
    "seqlen_q": [1, 2],
    "heads": [1, 17],
    "topk": [0, 1, 64, 100],
    "page_size": [1, 3, 64],
    "lengths": [None, "of requests", "of tokens"],
    "extra": [None, 0, 70],
    "extra_page_size": [2, 5],
    "bad_indices": [False, True],
    "sink": [None, "normal", "extreme"],
    "scale": [None, 0.07, "traced", "negative"],
    "splits": [1, 2, "schedule", "schedule of other lengths", "schedule of one part"],
    "block_n": [16, 64],
    "width": [128, 256, 512],
}
# With nothing listed no kernel is launched.
ROWS = [row for row in covering_rows(PARAMETERS, at_least=48) if row["topk"] or row["extra"]]


def make_call(row, seed):
    """The call that a row describes; whatever a result may not depend on is NaN."""
    rng = np.random.default_rng(seed)
    shape = calls.shape_of(row)
    call = calls.make_call(shape, seed)
    for prefix, topk in (("", row["topk"]), ("extra_", row["extra"])):
        if topk is None:
            continue
        indices = call[f"{prefix}indices"]
        if row["bad_indices"]:
            outside = rng.choice([-1, 2**31 - 1, -(2**31), 10**6], indices.shape)
            indices = np.where(rng.random(indices.shape) < 0.15, outside, indices)
        call[f"{prefix}indices"] = indices.astype(np.int32)
        if row["lengths"]:
            sizes = indices.shape[: 1 if row["lengths"] == "of requests" else 2]
            call[f"{prefix}topk_length"] = rng.integers(-1, topk + 2, sizes).astype(np.int32)
    if row["sink"]:
        sinks = {"normal": rng.standard_normal(row["heads"]), "extreme": np.array(EXTREME)}
        call["attn_sink"] = np.resize(sinks[row["sink"]], row["heads"]).astype(np.float32)
    scales = {"traced": np.float32(0.05), "negative": np.float32(-0.05)}
    if row["scale"]:
        call["softmax_scale"] = np.asarray(scales.get(row["scale"], row["scale"]))
    for prefix in ("", "extra_") if row["extra"] is not None else ("",):
        call = calls.fill_unused(call, calls.POISON, prefix)
    return call


def schedule_of(call, splits):
    """A schedule for a call, for other lengths of its shape, or of one part."""
    batch, seqlen_q, heads, _ = call["q"].shape
    made_for = {n: call.get(n) for n in ("topk_length", "extra_topk_length")}
    if splits == "schedule of other lengths":
        short = np.arange(batch, dtype=np.int32) * 70
        made_for = dict.fromkeys(made_for, short)
    return mla_schedule(
        **{n: x for n, x in made_for.items() if n == "topk_length" or "extra_indices" in call},
        batch=batch,
        seqlen_q=seqlen_q,
        num_heads=heads,
        topk=call["indices"].shape[2],
        extra_topk=call["extra_indices"].shape[2] if "extra_indices" in call else 0,
        num_parts=1 if splits == "schedule of one part" else 5,
    )


def run_kernels(call, gpu, plan, monkeypatch):
    """(out, lse) of a call."""

    def adapt(operands):
        return operands | {"q": operands["q"].astype(jnp.float32)}

    put_kernels_in_place(monkeypatch, api, "sparse_mla", gpu=gpu, adapt=adapt)
    return api.sparse_mla_decode(**arguments(call), return_lse=True, plan=plan)


def check(got, call):
    out, lse = got
    want_out, want_lse = calls.expected(call)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
    finite = np.isfinite(want_lse)
    np.testing.assert_allclose(lse[finite], want_lse[finite], rtol=0, atol=KERNEL_LSE)
    assert relative_frobenius(out, want_out) <= KERNEL_OUT[jnp.dtype(jnp.float32)]


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_against_the_oracle(index, monkeypatch):
    row = ROWS[index]
    call = make_call(row, index)
    splits = row["splits"] if isinstance(row["splits"], int) else None
    if splits is None:
        call["schedule"] = schedule_of(call, row["splits"])
    plan = SparseMlaPlan(num_splits=splits, block_h=16, block_n=row["block_n"], width=row["width"])
    check(run_kernels(call, row["gpu"], plan, monkeypatch), call)


@pytest.mark.parametrize("gpu", ["a100", "h200"])
@pytest.mark.parametrize("format", ["v32", "model1"])
def test_every_code_and_many_scales(format, gpu, monkeypatch):
    """All e4m3 numbers, subnormal and negative ones too, under scales from tiny to huge."""
    call = calls.make_call(calls.Shape(1, 1, 2, 20, format, page_size=20, num_blocks=1))
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    flat = call["kv_cache"].reshape(-1)
    for token in range(20):
        _, places = calls.token_places(format, token, 20)
        if format == "v32":
            flat[places[:512]] = np.resize(np.roll(codes, token), 512)
            scales = np.float32([1e-4, -0.013, 0.0, 2.0]) * np.float32(token)
            flat[places[512:528]] = scales.view(np.uint8)
        else:
            flat[places[:448]] = np.resize(np.roll(codes, token), 448)
            flat[places[576:]] = np.arange(8) + 110 + token
    call["indices"] = np.arange(20, dtype=np.int32).reshape(1, 1, 20)
    call["q"] = (call["q"] * np.array(1 / 256, BF16)).astype(BF16)
    check(run_kernels(call, gpu, SparseMlaPlan(num_splits=1), monkeypatch), call)


def test_nan_scale_of_model1(monkeypatch):
    """The byte 255 is NaN, and it reaches the heads that attend to it, no others."""
    call = calls.make_call(calls.Shape(2, 1, 2, 1, "model1", page_size=4, num_blocks=1))
    call["indices"] = np.array([0, 1], np.int32).reshape(2, 1, 1)
    call["kv_cache"].reshape(-1)[576 * 4] = 255
    out, lse = run_kernels(call, "h200", SparseMlaPlan(num_splits=1), monkeypatch)
    assert np.isnan(lse[0]).all()
    assert np.isfinite(out[1]).all() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("format", calls.FORMATS)
def test_caches_without_slots(format, monkeypatch):
    for sizes in ({"num_blocks": 0}, {"page_size": 0}, {"num_blocks": 0, "extra_topk": 3}):
        call = calls.make_call(calls.Shape(format=format, **sizes))
        check(run_kernels(call, "h200", None, monkeypatch), call)
