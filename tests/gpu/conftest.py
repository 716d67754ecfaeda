"""Without a GPU there is nothing to run here."""

import jax
import pytest


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if "tests/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: JAX_BEAM_ATTN_TEST_GPU=1"))
