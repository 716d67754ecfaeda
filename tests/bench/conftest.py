from typing import Any

import pytest

from bench.results import Row


@pytest.fixture
def make_row():
    """A row with everything filled in; keyword arguments replace."""

    def make(**changes: Any) -> Row:
        fields: dict[str, Any] = {
            "id": "beam-2",
            "implementation": "triton",
            "us": 19.0,
            "us_p10": 18.5,
            "us_p90": 19.75,
            "us_min": 18.0,
            "error": 2e-3,
            "tolerance": 4e-3,
            "l2": "warm",
            "calls": 20,
            "samples": 25,
            "floor_us": 10.88,
            "commit": "aaaa",
            "date": "2026-12-01T10:00:00+00:00",
            "versions": {"jax": "0.11.2"},
        }
        return Row(**(fields | changes))

    return make
