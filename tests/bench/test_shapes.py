import json
import pathlib

import pytest

from bench import shapes
from bench.table import format_floors

# The published floors, in microseconds, as they are printed there.
FLOORS = {
    "beam-0": "23.0",
    "beam-1": "10.7",
    "beam-2": "10.9",
    "beam-3": "29.7",
    "beam-4": "29.7",
    "beam-5": "21.8",
    "beam-6": "43.6",
    "beam-7": "87.0",
    "beam-8": "0.1",
    "mla-v32-b1-q1-h128": "0.7",
    "mla-v32-b2-q1-h128": "1.4",
    "mla-v32-b2-q2-h128": "2.9",
    "mla-v32-b64-q1-h128": "46.2",
    "mla-v32-b128-q1-h128": "92.4",
    "mla-v32-b128-q2-h128": "184.8",
    "mla-v32-b1-q1-h64": "0.4",
    "mla-v32-b64-q1-h64": "23.1",
    "mla-v32-b128-q1-h64": "46.2",
    "mla-v32-b128-q2-h64": "92.4",
    "mla-v32-b128-q1-h16": "38.8",
    "mla-model1-b2-q1-h64-x512": "0.2",
    "mla-model1-b128-q1-h64-x512": "14.2",
    "mla-model1-b128-q1-h64-x1024": "24.5",
    "mla-model1-b2-q1-h128-x1024": "0.8",
    "mla-model1-b64-q1-h128-x1024": "24.5",
    "mla-model1-b128-q1-h128-x1024": "48.9",
    "tq-64x32768-4bit_nc": "489",
    "tq-64x32768-3bit_nc": "372",
    "tq-64x32768-k8v4": "715",
    "tq-16x8192-4bit_nc": "31",
    "tq-16x8192-k8v4": "45",
    "tq-1x131072-4bit_nc": "31",
    "tq-1x131072-k8v4": "45",
    "tq-1x8192-4bit_nc": "2",
    "tq-64x8192-d64-4bit_nc": "64",
}

SHARED_PEERS = pathlib.Path(__file__).parents[3] / "shared" / "peers.json"


@pytest.mark.parametrize("row_id", FLOORS)
def test_floor_is_the_published_one(row_id):
    published = FLOORS[row_id]
    decimals = len(published.partition(".")[2])
    floor = shapes.BY_ID[row_id].floor.us
    assert abs(floor - float(published)) <= 0.5 * 10**-decimals


def test_every_published_row_has_a_floor_here():
    without_number = {"beam-9", "beam-9-dense"}
    measured = {shape.id for shape in (*shapes.BEAM, *shapes.MLA, *shapes.TURBOQUANT)}
    assert measured == FLOORS.keys() | without_number


@pytest.mark.skipif(not SHARED_PEERS.exists(), reason="the published rows are not there")
def test_shapes_are_the_published_ones():
    names = {
        "B": "batch",
        "W": "width",
        "Hq": "heads",
        "Hkv": "kv_heads",
        "D": "head_dim",
        "Sq": "seqlen_q",
        "extra": "extra_topk",
        "slot": "slot_bytes",
    }
    fields = {"context", "steps", "topk", *names}
    for row in json.loads(SHARED_PEERS.read_text())["rows"]:
        shape = shapes.BY_ID[row["id"]]
        for field in fields & row.keys():
            assert getattr(shape, names.get(field, field)) == row[field], (row["id"], field)
        if "floor" in row:
            assert round(shape.floor.us) == row["floor"], row["id"]


def test_ragged_row():
    ragged, dense = shapes.BY_ID["beam-9"], shapes.BY_ID["beam-9-dense"]
    assert isinstance(ragged, shapes.BeamShape)
    assert isinstance(dense, shapes.BeamShape)
    lengths = ragged.lengths
    assert lengths is not None
    assert len(lengths) == ragged.batch
    assert min(lengths) >= 256
    assert max(lengths) <= ragged.context
    assert abs(sum(lengths) / len(lengths) - 2900) < 10
    assert (dense.flop, dense.nbytes) == (ragged.flop, ragged.nbytes)


def test_notes_hold_the_floors():
    notes = pathlib.Path(shapes.__file__).with_name("NOTES.md").read_text()
    assert format_floors(shapes.BEAM) in notes
