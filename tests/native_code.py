"""Whether native code must be there: `make test` builds it first and says so."""

import os

import pytest

from jax_beam_attn._core import native


def require(part: native.Part) -> None:
    """Skips, or in CI fails, where a part's library cannot be used."""
    state = native.status()[part]
    if not state.available:
        missing = pytest.fail if os.environ.get("JAX_BEAM_ATTN_REQUIRE_NATIVE") else pytest.skip
        missing(f"{part}: {state.reason}")
