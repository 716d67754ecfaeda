"""Covering sets: few rows in which every pair of values of any two parameters occurs together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def covering_rows(
    parameters: Mapping[str, Sequence[Any]], *, at_least: int = 0, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows that cover all pairs of values, filled up with random rows.

    Greedy: each row starts from a pair not covered yet and takes, for one parameter after the
    other, the value that covers most pairs with those already taken.

    Args:
        parameters: Values by name.
        at_least: Least number of rows.
        seed: Of the random order; the same seed gives the same rows.

    Returns:
        One dict a row.
    """
    rng = random.Random(seed)
    names = list(parameters)
    open_pairs = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(parameters[a]))
        for j in range(len(parameters[b]))
    }
    order = {name: position for position, name in enumerate(names)}

    def pair(a, b):
        return (a, b) if order[a[0]] < order[b[0]] else (b, a)

    rows = []
    while open_pairs or len(rows) < at_least:
        row = dict(rng.choice(sorted(open_pairs))) if open_pairs else {}
        for name in rng.sample(names, len(names)):
            if name in row:
                continue
            values = rng.sample(range(len(parameters[name])), len(parameters[name]))
            row[name] = max(
                values,
                key=lambda v: sum(pair((name, v), other) in open_pairs for other in row.items()),
            )
        for a, b in itertools.combinations(row.items(), 2):
            open_pairs.discard(pair(a, b))
        rows.append({name: parameters[name][row[name]] for name in names})
    return rows
