"""What a suite is, and how its rows are measured."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from bench.check import relative_error
from bench.results import Row
from bench.stamp import Stamp
from bench.timing import Inputs, L2State, Settings, Timing, time_call


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute the operator.

    Attributes:
        run: From inputs to the output. Raises NotImplementedError or ValueError, with the
            reason, for a call or a machine that it does not serve.
        tolerance: The largest relative error of a right result.
        time_call: How `run` is timed; another framework brings its own way.
    """

    run: Callable[..., Any]
    tolerance: float
    time_call: Callable[..., tuple[Timing, list[jax.Array]]] = time_call


@dataclasses.dataclass(frozen=True)
class Suite:
    """An operator's benchmark.

    Attributes:
        shapes: The rows.
        quick_shapes: Rows small enough for a CPU.
        l2: State of the L2 cache that the peers of this suite were measured with.
        make_inputs: From a shape to random inputs.
        reference: From inputs to the float32 output.
        implementations: By name.
    """

    shapes: Sequence[Any]
    quick_shapes: Sequence[Any]
    l2: L2State
    make_inputs: Callable[[Any], Inputs]
    reference: Callable[[Inputs], jax.Array]
    implementations: Mapping[str, Implementation]


def measure(
    suite: Suite,
    shape: Any,
    names: Sequence[str],
    l2: L2State,
    settings: Settings,
    stamp: Stamp,
) -> tuple[list[Row], list[str]]:
    """Measures implementations on a shape, and checks what they computed while being measured.

    What an implementation does not serve is printed and left out. A row under another state of
    the L2 cache than the suite's own has an id of its own.

    Returns:
        The rows, and one line for each failure: an error, or a wrong result.
    """
    rows, failures = [], []
    row_id = shape.id if l2 == suite.l2 else f"{shape.id}-{l2}"
    inputs = jax.block_until_ready(suite.make_inputs(shape))
    expected = suite.reference(inputs)
    for name in names:
        implementation = suite.implementations[name]
        print(f"{row_id} {name}", flush=True)
        try:
            timing, outputs = implementation.time_call(
                implementation.run, inputs, l2=l2, nbytes=shape.nbytes, settings=settings
            )
        except (NotImplementedError, ValueError) as reason:
            print(f"  skipped: {reason}")
            continue
        except Exception as error:  # one row must not take the others with it
            traceback.print_exc()
            failures.append(f"{row_id} {name}: {type(error).__name__}")
            continue
        print(f"  {timing.us:.1f} us", flush=True)
        for doubt in timing.doubts:
            print(f"  doubtful: {doubt}")
        row = Row(
            id=row_id,
            implementation=name,
            us=timing.us,
            us_p10=timing.us_p10,
            us_p90=timing.us_p90,
            us_min=timing.us_min,
            error=_worst_error(outputs, expected),
            tolerance=implementation.tolerance,
            l2=timing.l2,
            calls=timing.calls,
            samples=timing.samples,
            floor_us=shape.floor.us,
            commit=stamp.commit,
            date=stamp.date,
            versions=stamp.versions,
        )
        rows.append(row)
        if not row.correct:
            failures.append(f"{row_id} {name}: error {row.error:.1e} > {row.tolerance:.1e}")
    return rows, failures


def _worst_error(outputs: Sequence[jax.Array], expected: jax.Array) -> float:
    """The largest error of all calls, NaN if one has NaN."""
    return float(np.max([relative_error(output, expected) for output in outputs]))
