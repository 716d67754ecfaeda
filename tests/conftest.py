"""What every test run needs before JAX is imported."""

import os

from hypothesis import HealthCheck, settings

# Eight devices for the sharding tests, whatever the machine has.
_DEVICES = "--xla_force_host_platform_device_count"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}=8".strip()

# The tests of tests/gpu are run with JAX_BEAM_ATTN_TEST_GPU=1; all others belong on the CPU, also
# on a machine that has a GPU.
if os.environ.get("JAX_BEAM_ATTN_TEST_GPU", "0") in ("", "0"):
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The references are compiled more often than they run: LLVM takes longer than what it saves.
    os.environ["XLA_FLAGS"] += (
        " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
else:
    # XLA measures several kernels for each matrix product of the references: time for nothing.
    os.environ["XLA_FLAGS"] += " --xla_gpu_autotune_level=0"

# A new shape costs a compilation, so no deadline and few examples; always the same ones, so that
# a change is not blamed for what it did not do. `--hypothesis-profile=deep` looks further.
settings.register_profile(
    "quick",
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "deep",
    max_examples=1000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")
