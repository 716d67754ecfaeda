import subprocess

import pytest

from bench.stamp import make_stamp


def test_a_given_commit_is_taken():
    stamp = make_stamp("cccc")
    assert stamp.commit == "cccc"
    assert {"python", "jax", "jaxlib"} <= stamp.versions.keys()


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.CalledProcessError(128, "git")])
def test_without_git(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    assert make_stamp(None).commit == "unknown"
