"""Runs `tests/interpreted` in a process in which Triton interprets its kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_beam_attn._core import availability
from jax_beam_attn._core.target import TARGETS

_NO_TRITON = availability.triton_unavailable(TARGETS["a100"])


@pytest.mark.skipif(_NO_TRITON is not None, reason=str(_NO_TRITON))
def test_kernels_through_tritons_interpreter():
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout and " skipped" not in result.stdout
