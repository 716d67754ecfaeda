"""Loading and registering the libraries, and the CPU probe run through XLA."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn._core import native

PROBE = "jax_beam_attn_probe"
CSRC = pathlib.Path(__file__).parents[2] / "csrc"


def probe(x, size=None):
    result = jax.ShapeDtypeStruct(x.shape if size is None else (size,), jnp.int32)
    return jax.ffi.ffi_call(PROBE, result)(x)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """The module as it is before first use, looking for libraries in an empty folder."""
    monkeypatch.setattr(native, "_FOLDER", tmp_path)
    monkeypatch.setattr(native, "_libraries", {})
    monkeypatch.setattr(native, "_handlers", {})
    return tmp_path


def compile_library(path, abi=native.ABI_VERSION, ffi=(0, 0)):
    """A library of three numbers, no handlers."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    numbers = {"abi_version": abi, "ffi_api_major": ffi[0], "ffi_api_minor": ffi[1]}
    source = "".join(f"int jax_beam_attn_{k}(void) {{ return {v}; }}\n" for k, v in numbers.items())
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True)


def test_abi_version_is_that_of_the_sources():
    header = (CSRC / "abi.h").read_text()
    assert re.search(rf"kAbiVersion = {native.ABI_VERSION};", header)


@pytest.mark.parametrize("part", native.PARTS)
def test_built_library_is_available(built, part):
    built(part)
    assert native.status()[part] == native.Availability(True)
    assert native.register(PROBE, part) == native.Availability(True)


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("nm"), reason="needs Linux and nm")
@pytest.mark.parametrize("part", native.PARTS)
def test_exports_only_its_own(built, part):
    """The C++ library's templates must not be merged with another copy's (csrc/CMakeLists.txt)."""
    built(part)
    command = ["nm", "--dynamic", "--defined-only", "--format=just-symbols", native._path(part)]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert symbols and all(symbol.startswith("jax_beam_attn_") for symbol in symbols)


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_probe(built, n):
    built("cpu")
    assert native.register(PROBE, "cpu").available
    x = np.arange(n, dtype=np.int32)
    np.testing.assert_array_equal(jax.jit(probe)(x), x + native.ABI_VERSION)


@pytest.mark.parametrize(
    ("x", "size", "message"),
    [
        (np.zeros(3, np.float32), None, "expected S32 but got F32"),
        (np.zeros((3, 2), np.int32), None, "expected 1 but got 2"),
        (np.zeros(3, np.int32), 5, "the result has 5 elements, expected those of x, 3"),
    ],
)
def test_probe_refuses(built, x, size, message):
    built("cpu")
    assert native.register(PROBE, "cpu").available
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(jax.jit(probe, static_argnums=1)(x, size))


def test_unknown_handler(built):
    built("cpu")
    state = native.register("jax_beam_attn_nothing", "cpu")
    assert not state.available
    assert "no handler jax_beam_attn_nothing" in state.reason


def test_not_built(fresh):
    for part in native.PARTS:
        assert "not built" in native.status()[part].reason
        assert native.register(PROBE, part) == native.status()[part]


def test_broken_library(fresh):
    (fresh / "libjax_beam_attn_cpu.so").write_text("no library")
    assert "failed to load" in native.status()["cpu"].reason


def test_foreign_library(fresh):
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    library = fresh / "libjax_beam_attn_cpu.so"
    subprocess.run([compiler, "-shared", "-x", "c", "/dev/null", "-o", str(library)], check=True)
    assert "is no library of jax_beam_attn" in native.status()["cpu"].reason


def test_other_abi_version(fresh):
    compile_library(fresh / "libjax_beam_attn_cpu.so", abi=native.ABI_VERSION + 1)
    reason = native.status()["cpu"].reason
    assert f"ABI version {native.ABI_VERSION + 1}" in reason
    assert str(native.ABI_VERSION) in reason


def test_built_for_a_newer_jaxlib(fresh):
    major, minor = native._ffi_api_version() or pytest.fail("jaxlib's header was not understood")
    compile_library(fresh / "libjax_beam_attn_cpu.so", ffi=(major, minor + 1))
    assert f"built for XLA FFI {major}.{minor + 1}" in native.status()["cpu"].reason


def test_built_for_this_jaxlib(fresh):
    compile_library(fresh / "libjax_beam_attn_cpu.so", ffi=native._ffi_api_version() or (0, 0))
    assert native.status()["cpu"].available


def test_registers_once_from_many_threads(fresh, monkeypatch):
    compile_library(fresh / "libjax_beam_attn_cpu.so")
    calls = []

    def register(*call):
        calls.append(call)
        return native.Availability(True)

    monkeypatch.setattr(native, "_register", register)
    threads = [threading.Thread(target=native.register, args=(PROBE, "cpu")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [(PROBE, "cpu")]


def test_import_loads_nothing():
    """It needs JAX and NumPy alone and asks no device, which this JAX_PLATFORMS would refuse."""
    code = """
import sys
for name in ["triton", "jax_triton", "cutlass", "gguf", "tokenizers", "matplotlib", "tqdm"]:
    sys.modules[name] = None  # importing it raises
import jax_beam_attn
from jax_beam_attn._core import native
assert not native._libraries and not native._handlers
"""
    env = os.environ | {"JAX_PLATFORMS": "none_such"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
