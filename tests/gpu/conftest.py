"""Without a GPU there is nothing to run here; with one, native code is built from its sources."""

import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

from jax_beam_attn._core import native

CHECKOUT = pathlib.Path(__file__).parents[2]


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if "tests/gpu/" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="needs a GPU: JAX_BEAM_ATTN_TEST_GPU=1"))


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The folder of freshly built libraries."""
    if not (shutil.which("nvcc") and shutil.which("cmake")):
        pytest.skip("no nvcc or no cmake")
    build, prefix = tmp_path_factory.mktemp("build"), tmp_path_factory.mktemp("prefix")
    configure = ["cmake", "-S", CHECKOUT / "csrc", "-B", build, "-DJAX_BEAM_ATTN_CUDA=ON"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_INSTALL_PREFIX={prefix}"]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", build, "--parallel"], check=True)
    subprocess.run(["cmake", "--install", build], check=True)
    return prefix / "jax_beam_attn" / "_native"


@pytest.fixture(scope="session")
def registered(built):
    """The library uses what was built, from here to the end of the session."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_FOLDER", built)
        patch.setattr(native, "_libraries", {})
        patch.setattr(native, "_handlers", {})
        of_gpu = [name for name, parts in native.HANDLERS.items() if "cuda" in parts]
        for name in ("jax_beam_attn_probe", *of_gpu):
            assert native.register(name, "cuda") == native.Availability(True)
        yield
