import numpy as np
import pytest

from bench import __main__ as command
from bench import mla, shapes
from bench.check import relative_error
from bench.peers import peers_by_id
from jax_beam_attn import MlaSchedule
from tests.sparse_mla.oracle import sparse_mla_oracle


@pytest.mark.parametrize("shape", shapes.MLA_QUICK, ids=lambda shape: shape.id)
def test_inputs_read_what_the_floor_counts(shape):
    inputs = mla.make_inputs(shape)
    pages = shape.batch * shape.context // shape.page_size
    for prefix, topk in (("", shape.topk), ("extra_", shape.extra_topk)):
        if not topk:
            continue
        cache, listed = inputs[f"{prefix}kv_cache"], np.asarray(inputs[f"{prefix}indices"])
        assert cache.shape == (pages, shape.page_size, 1, shape.token_bytes)
        assert listed.shape == (shape.batch, shape.seqlen_q, topk)
        np.testing.assert_array_equal(
            listed // shape.context, np.arange(shape.batch)[:, None, None] + 0 * listed
        )
        assert all(len(set(tokens)) == topk for tokens in listed.reshape(-1, topk).tolist())
    assert ("topk_length" in inputs) == shape.schedule_in_call
    assert isinstance(inputs.get("schedule"), MlaSchedule) != shape.schedule_in_call


@pytest.mark.parametrize("shape", shapes.MLA_QUICK, ids=lambda shape: shape.id)
def test_reference_is_the_definition_in_float32(shape):
    inputs = mla.make_inputs(shape)
    arrays = {name: np.asarray(x) for name, x in inputs.items() if name != "schedule"}
    got = mla.reference(inputs)
    assert got.dtype == np.float32
    assert relative_error(got, sparse_mla_oracle(**arrays)[0]) < 1e-5


def test_every_peer_row_is_measured():
    rows = {shape.id for shape in mla.SUITE.shapes}
    published = {row for row in peers_by_id() if row.startswith("mla-")}
    assert rows == published | {f"{row}-all" for row in published}


def test_command(capsys):
    arguments = ["--suite", "mla", "--quick", "--commit", "cccc"]
    assert command.main([*arguments, "--implementations", "reference", "triton"]) == 0
    printed = capsys.readouterr().out
    for shape in shapes.MLA_QUICK:
        assert f"{shape.id} triton\n  skipped" in printed
        assert any(
            line.startswith(f"{shape.id} ") and " reference " in line and "e-03" in line
            for line in printed.splitlines()
        )
