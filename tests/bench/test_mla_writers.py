import numpy as np
import pytest

from bench import __main__ as command
from bench import mla_writers
from bench.mla_writers import LAYERS, SUITE, AppendShape
from jax_beam_attn import pack_mla_cache
from jax_beam_attn._core import native


@pytest.mark.parametrize("format", ["v32", "model1"])
def test_the_last_layer_is_what_the_cache_holds(format):
    inputs = SUITE.make_inputs(AppendShape("", format, 64))
    keys = inputs[f"kv {LAYERS - 1}"][np.argsort(inputs["slots"])]
    want = pack_mla_cache(keys.reshape(1, 64, 1, -1), format)
    np.testing.assert_array_equal(SUITE.reference(inputs), want)


@pytest.mark.parametrize("shape", SUITE.shapes, ids=lambda shape: shape.id)
def test_inputs_say_what_they_are_for(shape):
    inputs = SUITE.make_inputs(shape)
    assert mla_writers._shape_of(inputs).static == shape.static
    if isinstance(shape, AppendShape):
        keys = [each.nbytes for name, each in inputs.items() if name.startswith("kv")]
        assert sum(keys) == shape.nbytes - LAYERS * shape.tokens * shape.token_bytes


def test_quick_run(capsys):
    implementations = ["reference"]
    if native.status()["cpu"].available:
        implementations.append("native")
    arguments = ["--suite", "mla-writers", "--quick", "--commit", "aaaa"]
    assert command.main([*arguments, "--implementations", *implementations]) == 0
    printed = capsys.readouterr().out
    assert "WRONG" not in printed
    for shape in SUITE.quick_shapes:
        for name in implementations:
            assert f"{shape.id} {name}" in printed


def test_floors(capsys):
    assert command.main(["--suite", "mla-writers", "--floors"]) == 0
    assert "mla-schedule-b512" in capsys.readouterr().out
