"""Wheels built on machines with all, some and none of the compilers."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import jaxlib
import pytest

import jax_beam_attn

CHECKOUT = pathlib.Path(__file__).parents[2]
LIBRARIES = {f"jax_beam_attn/_native/libjax_beam_attn_{part}.so" for part in ("cpu", "cuda")}

pytest.importorskip("scikit_build_core")
oldest = re.search(r'"jaxlib==([\d.]+);', (CHECKOUT / "pyproject.toml").read_text())
if oldest is None or jaxlib.__version__ != oldest[1]:
    pytest.skip("wheels are built with the headers of the oldest jaxlib", allow_module_level=True)


def build_wheel(folder, **env) -> pathlib.Path:
    """Builds with this environment's backend; its CMake is a Python package, not one on PATH."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(CHECKOUT)]
    inherited = {k: v for k, v in os.environ.items() if k not in ("CUDACXX", "CUDA_PATH")}
    subprocess.run(command, check=True, env=inherited | env)
    (wheel,) = folder.glob("*.whl")
    return wheel


def names(wheel: pathlib.Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def assert_complete(wheel: pathlib.Path) -> None:
    sources = {
        str(path.relative_to(CHECKOUT)) for path in (CHECKOUT / "jax_beam_attn").rglob("*.py")
    }
    assert sources <= names(wheel)
    assert "jax_beam_attn/py.typed" in names(wheel)
    assert any(name.endswith("licenses/LICENSE") for name in names(wheel))
    assert {name.split("/")[0] for name in names(wheel)} == {
        "jax_beam_attn",
        f"jax_beam_attn-{jax_beam_attn.__version__}.dist-info",
    }


def test_without_compilers(tmp_path):
    wheel = build_wheel(tmp_path, PATH=str(tmp_path), CXX="/bin/false")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert_complete(wheel)
    assert not names(wheel) & LIBRARIES


@pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")
def test_without_nvcc(tmp_path):
    wheel = build_wheel(tmp_path, CUDACXX="/bin/false")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    assert_complete(wheel)
    assert names(wheel) & LIBRARIES == {"jax_beam_attn/_native/libjax_beam_attn_cpu.so"}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="no nvcc")
def test_with_all(tmp_path):
    wheel = build_wheel(tmp_path)
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    assert_complete(wheel)
    assert names(wheel) & LIBRARIES == LIBRARIES
