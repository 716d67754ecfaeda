import json
import pathlib

import pytest

from bench import shapes
from bench.peers import peers_by_id, provenance

SHARED_PEERS = pathlib.Path(__file__).parents[3] / "shared" / "peers.json"


def test_every_measured_row_has_targets():
    measured = {shape.id for shape in (*shapes.BEAM, *shapes.MLA, *shapes.TURBOQUANT)}
    assert peers_by_id().keys() == measured - {"beam-9-dense"}


def test_aims_are_below_bars_and_above_floors():
    for row_id, peers in peers_by_id().items():
        assert peers.aim < peers.bar
        if peers.relative_to is None:
            assert shapes.BY_ID[row_id].floor.us < peers.aim


def test_every_peer_has_a_provenance():
    systems = {name for peers in peers_by_id().values() for name in peers.times}
    assert systems == provenance()["systems"].keys()


@pytest.mark.skipif(not SHARED_PEERS.exists(), reason="the published rows are not there")
def test_numbers_are_the_published_ones():
    for row in json.loads(SHARED_PEERS.read_text())["rows"]:
        peers = peers_by_id()[row["id"]]
        assert (peers.bar, peers.aim) == (row["bar"], row["aim"])
        systems = provenance()["systems"].keys()
        assert peers.times == {name: row[name] for name in systems if name in row}
