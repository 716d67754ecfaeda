import pytest

from bench.peers import peers_by_id
from bench.table import format_table, targets, verdict

TABLE = """\
id      implementation  us (p10..p90)      L2    floor  x floor  bar   aim   verdict  error
beam-2  triton          19.0 (18.5..19.8)  warm  10.9   1.75     20.0  17.5  bar      2.0e-03
quick   reference       19.0 (18.5..19.8)  warm  10.9   1.75     -     -     WRONG    nan"""


@pytest.mark.parametrize(
    ("us", "expected"), [(17.5, "aim"), (17.6, "bar"), (20.0, "bar"), (20.1, "slow")]
)
def test_verdicts(make_row, us, expected):
    row = make_row(us=us)
    assert targets(row, []) == (peers_by_id()["beam-2"].bar, peers_by_id()["beam-2"].aim)
    assert verdict(row, targets(row, [])) == expected


@pytest.mark.parametrize("error", [1.0, float("nan")])
def test_a_wrong_result_has_no_other_verdict(make_row, error):
    assert verdict(make_row(us=0.1, error=error), (20.0, 17.5)) == "WRONG"


def test_relative_targets_are_those_of_the_same_implementation(make_row):
    ragged = make_row(id="beam-9", us=45.0)
    dense = make_row(id="beam-9-dense", us=40.0)
    other = make_row(id="beam-9-dense", us=400.0, implementation="xla_naive")
    assert targets(ragged, [other]) is None
    assert targets(ragged, [other, dense]) == pytest.approx((50.0, 44.0))
    assert verdict(ragged, targets(ragged, [dense])) == "bar"


def test_table(make_row):
    rows = [make_row(), make_row(id="quick", implementation="reference", error=float("nan"))]
    assert format_table(rows) == TABLE


def test_table_finds_relative_targets_among_stored_rows(make_row):
    table = format_table([make_row(id="beam-9", us=45.0)], [make_row(id="beam-9-dense", us=40.0)])
    assert " 50.0  44.0  bar " in table
