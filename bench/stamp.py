"""Where and with what a measurement was made."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

import jax

_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda13-plugin",
    "jax-triton",
    "triton",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-cu13",
)


@dataclasses.dataclass(frozen=True)
class Stamp:
    """Attributes: `date` is that of the run's start, UTC, ISO 8601."""

    gpu: str
    commit: str
    date: str
    versions: dict[str, str]


def make_stamp(commit: str | None) -> Stamp:
    """The stamp of a run that starts now; `commit` where there is no git to ask."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return Stamp(
        gpu=jax.devices()[0].device_kind,
        commit=commit or _git_commit() or "unknown",
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions,
    )


def add_commit_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--commit`, which is for `make_stamp`."""
    parser.add_argument(
        "--commit",
        default=os.environ.get("BENCH_COMMIT"),
        help="for machines without git (default: $BENCH_COMMIT, then git)",
    )


def _git_commit() -> str | None:
    """HEAD, marked if files differ from it; the results themselves do not count."""
    root = pathlib.Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}-dirty" if changed else head
