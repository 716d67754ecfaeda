"""What other systems reach on each row, and the times that ours must (bar) and should (aim) reach.

The numbers are data, in `peers.json`, with the system, GPU and date they come from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

_FILE = pathlib.Path(__file__).with_name("peers.json")


@dataclasses.dataclass(frozen=True)
class Peers:
    """The peers' times of one row in microseconds, and our targets.

    Attributes:
        bar: Microseconds, or a factor if `relative_to` is given.
        aim: Likewise.
        relative_to: The id of another row: bar and aim are multiples of the time that the same
            implementation takes there.
    """

    times: Mapping[str, float]
    bar: float
    aim: float
    relative_to: str | None = None
    note: str | None = None


@functools.cache
def provenance() -> Mapping[str, Any]:
    return json.loads(_FILE.read_text())["provenance"]


@functools.cache
def peers_by_id() -> Mapping[str, Peers]:
    rows = json.loads(_FILE.read_text())["rows"]
    return {row.pop("id"): Peers(**row) for row in rows}
