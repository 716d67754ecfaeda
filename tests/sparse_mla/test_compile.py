"""The kernels compile for every architecture served, and few of them serve many shapes."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jax_beam_attn import SparseMlaPlan, mla_schedule, sparse_mla_decode
from jax_beam_attn._core import availability
from jax_beam_attn._core.target import TARGETS
from tests.compiled import ARCHS, PTXAS, assemble, export_for, ptx_of
from tests.sparse_mla.oracle import HEAD_DIM, TOKEN_BYTES

_NO_TRITON = availability.triton_unavailable(TARGETS["h200"])
pytestmark = pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))

array = jax.ShapeDtypeStruct
index = functools.partial(array, dtype=jnp.int32)


def _cache(format, num_blocks, page_size, head_dim=576):
    if format == "bf16":
        return array((num_blocks, page_size, 1, head_dim), jnp.bfloat16)
    return array((num_blocks, page_size, 1, TOKEN_BYTES[format]), jnp.uint8)


def _export(
    gpu, *, format="v32", heads=64, batch=2, seqlen_q=1, topk=2048, page_size=64, num_blocks=100,
    extra_topk=None, lengths=False, schedule=False, **static,
):  # fmt: skip
    head_dim = HEAD_DIM.get(format, 576)
    lead = (batch, seqlen_q)
    call = {
        "q": array((*lead, heads, head_dim), jnp.bfloat16),
        "kv_cache": _cache(format, num_blocks, page_size),
        "indices": index((*lead, topk)),
    }
    if lengths:
        call["topk_length"] = index(lead)
    if extra_topk:
        call["extra_kv_cache"] = _cache(format, num_blocks, page_size + 2)
        call["extra_indices"] = index((*lead, extra_topk))
    if schedule:
        call["schedule"] = mla_schedule(
            batch=batch,
            seqlen_q=seqlen_q,
            num_heads=heads,
            topk=topk,
            extra_topk=extra_topk or 0,
        )
    function = functools.partial(sparse_mla_decode, implementation="triton", **static)
    return export_for(gpu, lambda call: function(**call), call)


@pytest.mark.parametrize("gpu", ARCHS)
@pytest.mark.parametrize(
    "case",
    [
        {"heads": 128, "lengths": True},
        {"format": "model1", "heads": 5, "page_size": 7, "extra_topk": 100, "schedule": True},
        {"format": "bf16", "heads": 32, "plan": SparseMlaPlan(num_splits=1)},
    ],
    ids=["v32", "model1 of odd pages", "bf16"],
)
def test_compiles(gpu, case, tmp_path):
    kernels = ptx_of(_export(gpu, **case))
    assert kernels and all(f".target {ARCHS[gpu]}" in ptx for ptx in kernels)
    if PTXAS is not None:
        for ptx in kernels:
            assert "registers" in assemble(ptx, ARCHS[gpu], tmp_path)


def test_a_tile_is_copied_while_another_is_used():
    """The gathers of every format are asynchronous, none of the keys waits in a register."""
    for format in ("v32", "model1", "bf16"):
        for heads in (16, 64):
            ptx = next(p for p in ptx_of(_export("h200", format=format, heads=heads)) if "mma" in p)
            assert ptx.count("cp.async.cg") + ptx.count("cp.async.ca") >= 16


def test_few_kernels_serve_many_shapes():
    """Batch, tokens, heads within a tile, pages, lengths of lists: all run-time scalars."""
    from jax_beam_attn._core.merge_triton import merge_kernel
    from jax_beam_attn.sparse_mla.kernel_triton import attend_kernel

    def export(n):
        _export(
            "h200",
            format="model1",
            heads=9 + n % 8,
            batch=1 + n,
            seqlen_q=1 + n % 3,
            topk=1 + 100 * n,
            page_size=64 + 2 * n,
            num_blocks=1 + n,
            extra_topk=64 + n,
            lengths=True,
        )

    export(0)
    compiled = len(attend_kernel._jT_kernel_cache), len(merge_kernel._jT_kernel_cache)
    for n in range(1, 20):
        export(n)
    assert (len(attend_kernel._jT_kernel_cache), len(merge_kernel._jT_kernel_cache)) == compiled


@pytest.mark.parametrize(
    "sizes, kernels",
    [
        ({"seqlen_q": 32768, "batch": 1, "lengths": True}, 1),  # case 10: parts would be gigabytes
        ({"batch": 132}, 1),
        ({"batch": 132, "schedule": True}, 1),
        ({"batch": 132, "lengths": True}, 2),
        ({"batch": 133}, 2),
        ({"batch": 1}, 2),
    ],
)
def test_rows_that_need_no_cutting_need_no_merge(sizes, kernels):
    assert len(ptx_of(_export("h200", **sizes))) == kernels


@pytest.mark.parametrize(
    "gpu, plan, message",
    [
        ("rtx 5090", {"block_h": 64, "block_n": 64}, r"plan needs \d+ bytes of shared.*RTX 5090"),
        ("a100", {"block_n": 64, "num_stages": 9}, r"plan needs \d+ bytes of shared memory.*A100"),
        ("b200", {"block_h": 64}, r"block_h=64 needs more tensor memory.*B200"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(gpu, plan, message):
    with pytest.raises(ValueError, match=message):
        _export(gpu, plan=SparseMlaPlan(**plan))
