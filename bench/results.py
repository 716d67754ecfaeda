"""The results file of a GPU: one row for each id and implementation.

A run may measure some rows only, so every row carries the commit, date and versions that it was
measured with. The header holds what all rows agree on, "mixed" where they differ, and the date
of the newest row.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

MIXED = "mixed"


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement. Times are microseconds of one call."""

    id: str
    implementation: str
    us: float
    us_p10: float
    us_p90: float
    us_min: float
    error: float
    tolerance: float
    l2: str
    calls: int
    samples: int
    floor_us: float
    commit: str
    date: str
    versions: dict[str, str]

    @property
    def correct(self) -> bool:
        """Whether the error is within the tolerance; a NaN is not."""
        return self.error <= self.tolerance

    @property
    def key(self) -> tuple[str, str]:
        """What a row replaces an older one by."""
        return self.id, self.implementation


def default_path(gpu: str) -> pathlib.Path:
    """`results/h200.json` for "NVIDIA H200"."""
    name = gpu.lower().removeprefix("nvidia").strip().replace(" ", "-")
    return pathlib.Path(__file__).parent / "results" / f"{name}.json"


def read(path: pathlib.Path) -> tuple[str | None, list[Row]]:
    """The GPU and the rows of a results file; None and none where there is no file."""
    if not path.exists():
        return None, []
    document = json.loads(path.read_text())
    return document["gpu"], [Row(**row) for row in document["rows"]]


def merge(path: pathlib.Path, gpu: str, new: Iterable[Row]) -> list[Row]:
    """Writes rows into a results file, in place of older ones of the same id and implementation.

    Wrong results have no time worth keeping and are left out.

    Returns:
        All rows of the file.

    Raises:
        ValueError: If the file is another GPU's.
    """
    file_gpu, old = read(path)
    if file_gpu not in (None, gpu):
        raise ValueError(f"{path}: holds results of {file_gpu!r}, these are of {gpu!r}")
    rows = {row.key: row for row in old} | {row.key: row for row in new if row.correct}
    merged = [rows[key] for key in sorted(rows)]
    if merged:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_document(gpu, merged), indent=1, allow_nan=False) + "\n")
    return merged


def _document(gpu: str, rows: list[Row]) -> dict[str, Any]:
    packages = sorted({package for row in rows for package in row.versions})
    return {
        "gpu": gpu,
        "commit": _common(row.commit for row in rows),
        "date": max(row.date for row in rows),
        "versions": {
            package: _common(row.versions.get(package, "none") for row in rows)
            for package in packages
        },
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _common(values: Iterable[str]) -> str:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else MIXED
