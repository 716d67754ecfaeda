"""Without a GPU there is nothing to run here; with one, native code is built unless it is there."""

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
    """The folder of the CUDA part: the installation's, or else one built from the sources."""
    if native.status()["cuda"].available:
        return native._FOLDER
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
    """The package uses what was built, from here to the end of the session.

    Tests before these may have run operators, and XLA registers no handler a second time from
    another library. So what is installed stays; where nothing is, nothing was registered.
    """
    with pytest.MonkeyPatch.context() as patch:
        if built != native._FOLDER:
            patch.setattr(native, "_FOLDER", built)
            patch.delitem(native._libraries, "cuda")
            for missing in [key for key in native._handlers if key[1] == "cuda"]:
                patch.delitem(native._handlers, missing)
        of_gpu = [name for name, parts in native.HANDLERS.items() if "cuda" in parts]
        for name in ("jax_beam_attn_probe", *of_gpu):
            assert native.register(name, "cuda") == native.Availability(True)
        yield
