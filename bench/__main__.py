"""`python -m bench --suite beam`: measures, checks, writes the results file, prints a table."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import jax

from bench import beam, mla, mla_writers, results, timing, turboquant
from bench.stamp import add_commit_option, make_stamp
from bench.suite import measure
from bench.table import format_floors, format_table

SUITES = {
    "beam": beam.SUITE,
    "mla": mla.SUITE,
    "mla-writers": mla_writers.SUITE,
    "turboquant": turboquant.SUITE,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    suite = SUITES[options.suite]
    if options.floors:
        print(format_floors(suite.shapes))
        return 0
    shapes = {each.id: each for each in (suite.quick_shapes if options.quick else suite.shapes)}
    ids = options.ids or list(shapes)
    names = options.implementations or list(suite.implementations)
    for what, given, known in (
        ("--ids", ids, shapes),
        ("--implementations", names, suite.implementations),
    ):
        if unknown := [each for each in given if each not in known]:
            parser.error(f"{what}: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    if jax.default_backend() != "gpu" and not options.quick:
        parser.error("no GPU here: the rows are measured on one; --quick runs tiny ones anywhere")

    stamp = make_stamp(options.commit)
    path = options.out or (None if options.quick else results.default_path(stamp.gpu))
    rows, failures, stored = [], [], []
    for each in ids:
        measured, failed = measure(
            suite,
            shapes[each],
            names,
            options.l2 or suite.l2,
            timing.QUICK if options.quick else timing.Settings(),
            stamp,
        )
        rows += measured
        failures += failed
        if path:  # at once: a run that is cut short keeps what it has measured
            stored = results.merge(path, stamp.gpu, measured)
    for failure in failures:
        print(f"FAILED {failure}")
    print(f"{stamp.gpu}, commit {stamp.commit}, {stamp.date}; times in us")
    print(format_table(rows, stored))
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--ids", nargs="+", help="rows to measure (default: all of the suite)")
    parser.add_argument("--implementations", nargs="+", help="default: all of the suite")
    parser.add_argument(
        "--l2", choices=("warm", "cold"), help="L2 cache state (default: the suite's own)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, help="results file (default: bench/results/<gpu>.json)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny rows, few samples; written only with --out"
    )
    parser.add_argument(
        "--floors", action="store_true", help="print the floors of the suite's rows, no more"
    )
    add_commit_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
