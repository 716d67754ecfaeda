"""The CUDA part (the installed one, or built from the sources beside these tests) on the GPU."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn._core import native

CHECKOUT = pathlib.Path(__file__).parents[2]
PROBE = "jax_beam_attn_probe"

pytestmark = pytest.mark.usefixtures("registered")


def probe(x, size=None):
    result = jax.ShapeDtypeStruct(x.shape if size is None else (size,), jnp.int32)
    return jax.ffi.ffi_call(PROBE, result)(x)


@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 1_000_000])
def test_probe(n):
    x = np.arange(n, dtype=np.int32)
    np.testing.assert_array_equal(jax.jit(probe)(x), x + native.ABI_VERSION)


def test_probe_in_a_loop():
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, x: probe(x) * 2 - x, x))
    x = np.arange(1000, dtype=np.int32)
    np.testing.assert_array_equal(loop(x), x + 200 * native.ABI_VERSION)


@pytest.mark.parametrize(
    ("x", "size", "message"),
    [
        (np.zeros(3, np.float32), None, "expected S32 but got F32"),
        (np.zeros((3, 2), np.int32), None, "expected 1 but got 2"),
        (np.zeros(3, np.int32), 5, "the result has 5 elements, expected those of x, 3"),
    ],
)
def test_probe_refuses(x, size, message):
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(probe, static_argnums=1)(x, size))


def test_machine_code_of_every_generation(built):
    if not (cuobjdump := shutil.which("cuobjdump")):
        pytest.skip("no cuobjdump")
    command = [cuobjdump, "--list-elf", "--list-ptx", built / "libjax_beam_attn_cuda.so"]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"\.(sm_\w+)\.cubin", listing)) == {"sm_80", "sm_90a", "sm_100", "sm_120"}
    assert set(re.findall(r"(sm_\w+)\.ptx", listing)) == {"sm_120"}


def test_probe_is_captured_into_a_cuda_graph(built, tmp_path):
    code = f"""
import pathlib
import jax, jax.numpy as jnp
from jax_beam_attn._core import native
native._FOLDER = pathlib.Path({str(built)!r})
assert native.register({PROBE!r}, "cuda").available
probe = lambda x: jax.ffi.ffi_call({PROBE!r}, jax.ShapeDtypeStruct(x.shape, jnp.int32))(x)
chain = jax.jit(lambda x: probe(probe(probe(probe(probe(probe(x)))))))
for _ in range(3):
    result = chain(jnp.arange(1000))
assert (result == jnp.arange(1000) + 6 * native.ABI_VERSION).all()
"""
    env = os.environ | {
        "XLA_FLAGS": f"--xla_dump_to={tmp_path}",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=env, cwd=CHECKOUT)
    dumps = [path for path in tmp_path.glob("*lambda*") if "thunk_sequence" in path.name]
    assert any("kCommandBuffer" in path.read_text() for path in dumps)
