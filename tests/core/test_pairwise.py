"""The covering sets really cover."""

import itertools

from tests.pairwise import covering_rows

PARAMETERS = {"a": [1, 2, 3, 4], "b": "xyz", "c": [None, True], "d": range(5)}


def test_every_pair_occurs_in_few_rows():
    rows = covering_rows(PARAMETERS)
    for a, b in itertools.combinations(PARAMETERS, 2):
        seen = {(row[a], row[b]) for row in rows}
        assert seen == set(itertools.product(PARAMETERS[a], PARAMETERS[b]))
    assert len(rows) < 4 * 3 * 5  # far from all 120 combinations


def test_rows_are_reproducible_and_filled_up():
    assert covering_rows(PARAMETERS, at_least=50) == covering_rows(PARAMETERS, at_least=50)
    assert len(covering_rows(PARAMETERS, at_least=50)) == 50
