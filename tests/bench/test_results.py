import json

import pytest

from bench import results

GPU = "NVIDIA H200"


def test_file_is_named_after_the_gpu():
    assert results.default_path(GPU).name == "h200.json"
    assert results.default_path("NVIDIA H100 80GB HBM3").name == "h100-80gb-hbm3.json"
    assert results.default_path("cpu").name == "cpu.json"


def test_first_run(tmp_path, make_row):
    path = tmp_path / "new" / "h200.json"
    row = make_row()
    assert results.merge(path, GPU, [row]) == [row]
    document = json.loads(path.read_text())
    assert document["gpu"] == GPU
    assert document["commit"] == row.commit
    assert document["date"] == row.date
    assert document["versions"] == row.versions
    (stored,) = document["rows"]
    assert stored["id"] == "beam-2"
    assert stored["implementation"] == "triton"
    assert stored["us"] == 19.0
    assert stored["error"] == 2e-3
    assert results.read(path) == (GPU, [row])


def test_newer_rows_replace_older_ones_of_their_key_only(tmp_path, make_row):
    path = tmp_path / "h200.json"
    kept = make_row(implementation="xla_naive")
    other_id = make_row(id="beam-1")
    results.merge(path, GPU, [make_row(), kept, other_id])
    newer = make_row(us=17.0, commit="bbbb", date="2026-12-02T10:00:00+00:00")
    rows = results.merge(path, GPU, [newer])
    assert sorted(rows, key=lambda row: row.key) == [other_id, newer, kept]


def test_a_partial_run_does_not_claim_the_other_rows(tmp_path, make_row):
    path = tmp_path / "h200.json"
    results.merge(path, GPU, [make_row(), make_row(id="beam-1")])
    newer = make_row(
        commit="bbbb",
        date="2026-12-02T10:00:00+00:00",
        versions={"jax": "0.12.0", "triton": "3.9.0"},
    )
    results.merge(path, GPU, [newer])
    document = json.loads(path.read_text())
    assert document["commit"] == "mixed"
    assert document["versions"] == {"jax": "mixed", "triton": "mixed"}
    assert document["date"] == newer.date
    by_id = {row["id"]: row for row in document["rows"]}
    assert by_id["beam-1"]["commit"] == "aaaa"
    assert by_id["beam-1"]["versions"] == {"jax": "0.11.2"}
    assert by_id["beam-2"]["commit"] == "bbbb"
    results.merge(path, GPU, [make_row(id="beam-1", commit="bbbb")])
    assert json.loads(path.read_text())["commit"] == "bbbb"


@pytest.mark.parametrize("error", [5e-3, float("nan"), float("inf")])
def test_wrong_results_are_not_stored(tmp_path, make_row, error):
    path = tmp_path / "h200.json"
    right = make_row()
    results.merge(path, GPU, [right])
    assert results.merge(path, GPU, [make_row(us=1.0, error=error)]) == [right]
    assert results.read(path) == (GPU, [right])


def test_results_of_two_gpus_are_not_mixed(tmp_path, make_row):
    path = tmp_path / "h200.json"
    results.merge(path, GPU, [make_row()])
    with pytest.raises(ValueError, match="H200"):
        results.merge(path, "NVIDIA H100", [make_row()])
