"""The report of `python -m jax_beam_attn info`."""

import jax

from jax_beam_attn import info
from jax_beam_attn._core import native


def test_report_names_versions_devices_and_reasons():
    lines = info.report()
    assert f"  jax {jax.__version__}" in lines
    assert f"  {jax.device_count()} x cpu: cpu" in lines
    for name, kernels in (
        ("beam_decode_attn", ["cute", "triton"]),
        ("sparse_mla_decode", ["triton"]),
    ):
        operator = lines.index(name)
        assert lines[operator + 1 : operator + 2 + len(kernels)] == [
            *(f"  {kernel}: no CUDA GPU here" for kernel in kernels),
            "  reference: available",
        ]


def test_report_says_why_a_native_part_is_missing(monkeypatch):
    missing = {"cuda": native.Availability(available=False, reason="not built: no nvcc")}
    monkeypatch.setattr(native, "status", lambda: missing)
    assert "  cuda: not built: no nvcc" in info.report()
