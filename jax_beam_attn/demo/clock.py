"""Where the time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Clock:
    """Measures named phases of a run.

    Attributes:
        seconds: What each finished phase took.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what happens inside `with clock.phase(name):`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start

    def report(self) -> str:
        """The time since the clock was made, and the phases."""
        total = time.perf_counter() - self._start
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{total:.1f} s ({phases})"
