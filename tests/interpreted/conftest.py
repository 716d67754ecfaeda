"""Puts the interpreter in the place of jax-triton before any kernel module is imported."""

import os

import pytest

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

if INTERPRETING:
    from jax_beam_attn._core import triton_call
    from tests import interpreter

    triton_call.triton_call = interpreter.triton_call


def pytest_collection_modifyitems(items):
    if INTERPRETING:
        return
    for item in items:
        if "interpreted" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason="run by tests/test_interpreted.py"))
