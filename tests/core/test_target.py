"""GPU targets: names, devices, architectures."""

import dataclasses

import pytest

import jax_beam_attn
from jax_beam_attn._core.target import TARGETS, device_target, given_target


@dataclasses.dataclass
class FakeDevice:
    device_kind: str
    compute_capability: str
    core_count: int


def test_known_device_has_the_tables_l2():
    target = device_target(FakeDevice("NVIDIA H200", "9.0", 132))
    assert (target.arch, target.num_sms, target.l2_bytes) == ("sm_90a", 132, 60 * 2**20)


def test_a_smaller_variant_keeps_its_own_sm_count():
    assert device_target(FakeDevice("NVIDIA H100 PCIe", "9.0", 114)).num_sms == 114


def test_unknown_device_gets_the_smallest_l2_of_its_generation():
    target = device_target(FakeDevice("NVIDIA H999", "9.0", 99))
    assert (target.compute_capability, target.num_sms, target.l2_bytes) == (90, 99, 50 * 2**20)
    assert device_target(FakeDevice("NVIDIA Z1", "13.0", 200)).arch == "sm_130"


def test_gpu_target_nests_and_ends():
    assert given_target() is None
    with jax_beam_attn.gpu_target("h200"):
        with jax_beam_attn.gpu_target(TARGETS["a100"]):
            assert given_target().arch == "sm_80"
        assert given_target().arch == "sm_90a"
    assert given_target() is None


def test_bad_targets():
    with pytest.raises(ValueError, match=r"target: got 'tpu', expected one of"):
        jax_beam_attn.gpu_target("tpu")
    with pytest.raises(TypeError, match=r"target: got int"):
        jax_beam_attn.gpu_target(90)
