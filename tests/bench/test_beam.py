import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import __main__ as command
from bench import beam, shapes, timing
from bench.check import relative_error
from bench.stamp import Stamp
from bench.suite import Implementation, measure

STAMP = Stamp("cpu", "aaaa", "2026-12-01T10:00:00+00:00", {"jax": "0.11.2"})


@pytest.mark.parametrize("shape", shapes.BEAM_QUICK, ids=lambda shape: shape.id)
def test_inputs_read_what_the_floor_counts(shape):
    inputs = beam.make_inputs(shape)
    rows = np.asarray(inputs["topk_indices"])
    assert rows.shape == (shape.batch, 1, shape.kv_heads, shape.steps, shape.width)
    for of_head in rows.reshape(-1, shape.steps * shape.width):
        np.testing.assert_array_equal(np.sort(of_head), np.arange(shape.steps * shape.width))
    for step in range(shape.steps):
        assert set(np.unique(rows[:, :, :, step] // shape.width)) == {step}
    arrays = {name: inputs[name] for name in ("q", "k_context", "v_context", "k_beam", "v_beam")}
    assert all(array.dtype == jnp.bfloat16 for array in arrays.values())
    if not shape.lengths:
        assert sum(each.nbytes for each in arrays.values()) + arrays["q"].nbytes == shape.nbytes


@pytest.mark.parametrize("shape", shapes.BEAM_QUICK, ids=lambda shape: shape.id)
def test_naive_form_computes_the_same(shape):
    inputs = beam.make_inputs(shape)
    assert relative_error(beam.xla_naive(inputs), beam.reference(inputs)) < 4e-3


@pytest.mark.parametrize("shape", shapes.BEAM_QUICK, ids=lambda shape: shape.id)
def test_context_and_beams_merge_to_the_same(shape, monkeypatch):
    # XLA's attention in cuDNN's place; both return the LSE in bf16.
    attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *arrays, implementation, **options: attention(*arrays, **options),
    )
    inputs = beam.make_inputs(shape)
    assert relative_error(beam.cudnn_context_jnp(inputs), beam.reference(inputs)) < 1e-2


def test_reference_is_float32():
    inputs = beam.make_inputs(shapes.BEAM_QUICK[0])
    assert beam.reference(inputs).dtype == jnp.float32


def test_rows_failures_and_skips(capsys):
    def wrong(inputs):
        return beam.xla_naive(inputs) * 1.1

    def nan(inputs):
        return beam.xla_naive(inputs).at[0, 0, 0, 0, 0].set(jnp.nan)

    def broken(inputs):
        raise RuntimeError("no such kernel")

    def unable(inputs):
        raise NotImplementedError("only on Sundays")

    runs = {"right": beam.xla_naive, "wrong": wrong, "nan": nan, "broken": broken, "unable": unable}
    suite = dataclasses.replace(
        beam.SUITE,
        implementations={name: Implementation(run, 1e-2) for name, run in runs.items()},
    )
    shape = shapes.BEAM_QUICK[0]
    rows, failures = measure(suite, shape, list(runs), "warm", timing.QUICK, STAMP)
    assert [(row.implementation, row.correct) for row in rows] == [
        ("right", True),
        ("wrong", False),
        ("nan", False),
    ]
    assert rows[0].id == shape.id
    assert rows[0].floor_us == shape.floor.us
    assert rows[0].commit == STAMP.commit
    assert [failure.split(":")[0].split()[-1] for failure in failures] == ["wrong", "nan", "broken"]
    assert "skipped: only on Sundays" in capsys.readouterr().out


def test_command(tmp_path, capsys):
    out = tmp_path / "cpu.json"
    quick = ["--suite", "beam", "--quick", "--commit", "cccc", "--ids", "quick-ragged"]
    status = command.main(
        [*quick, "--implementations", "xla_naive", "cute", "cudnn_context_jnp", "--out", str(out)]
    )
    assert status == 0
    printed = capsys.readouterr().out
    assert "quick-ragged cute\n  skipped" in printed
    assert "quick-ragged cudnn_context_jnp\n  skipped: cuDNN needs a GPU" in printed
    assert printed.rstrip().splitlines()[-1].startswith("quick-ragged  xla_naive")
    document = json.loads(out.read_text())
    assert document["commit"] == "cccc"
    assert [(row["id"], row["implementation"]) for row in document["rows"]] == [
        ("quick-ragged", "xla_naive")
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--quick", "--ids", "beam-77"], "unknown beam-77"),
        (["--quick", "--implementations", "magic"], "unknown magic"),
        ([], "--quick"),
    ],
)
def test_command_refuses(arguments, message, capsys):
    with pytest.raises(SystemExit):
        command.main(["--suite", "beam", *arguments])
    assert message in capsys.readouterr().err
