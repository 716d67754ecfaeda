"""The machinery on a GPU: kernels of both compilers agree with their reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.row_sum import row_sum
from tests.tolerances import ROW_SUM_GPU

RNG = np.random.default_rng(0)


def _inputs(batch=37, columns=1000, lead=()):
    x = RNG.standard_normal((*lead, batch, columns)).astype(np.float32)
    x[..., columns - 1] = np.nan  # past every length
    length = RNG.integers(0, columns, (*lead, batch)).astype(np.int32)
    return x, length


def _check(got, x, length):
    keep = np.arange(x.shape[-1]) < length[..., None]
    want = np.where(keep, x, 0).astype(np.float64).sum(-1)
    np.testing.assert_allclose(np.asarray(got), want, **ROW_SUM_GPU)


@pytest.fixture(params=["triton", "cute"])
def kernel(request):
    return functools.partial(row_sum, implementation=request.param)


def test_eager_jit_vmap(kernel):
    x, length = _inputs(lead=(2,))
    _check(kernel(x[0], length[0]), x[0], length[0])
    _check(jax.jit(kernel)(x[1], length[1]), x[1], length[1])
    _check(jax.jit(jax.vmap(kernel))(x, length), x, length)


def test_loops(kernel):
    """Inside scan, many launches in one program, as captured into CUDA graphs."""
    x, length = _inputs(lead=(20,))
    scan = jax.jit(lambda xs: jax.lax.scan(lambda c, a: (c, kernel(*a)), 0, xs)[1])
    for _ in range(3):
        _check(scan((x, length)), x, length)


def test_shapes_in_turn(kernel):
    """One compiled kernel, many run-time sizes."""
    for batch, columns in ((1, 1), (1, 5000), (300, 3), (7, 129)):
        x, length = _inputs(batch, columns)
        _check(jax.jit(kernel)(x, length), x, length)


def test_transposed_operand(kernel):
    x, length = _inputs()
    _check(jax.jit(lambda x, n: kernel(x.T, n))(np.ascontiguousarray(x.T), length), x, length)


def test_exported_program_runs(kernel):
    import jax_beam_attn

    x, length = _inputs()
    exported = jax.export.export(
        jax.jit(kernel),
        platforms=["cuda"],
        disabled_checks=jax_beam_attn.export_disabled_checks(),
    )(x, length)
    _check(jax.export.deserialize(exported.serialize()).call(x, length), x, length)


def test_best_implementation_is_a_kernel():
    text = jax.jit(row_sum).lower(jnp.ones((3, 4)), jnp.ones(3, jnp.int32)).as_text()
    assert "custom_call" in text


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_second_gpu(kernel):
    x, length = _inputs(batch=2 * 8)
    second = jax.devices()[1]
    got = jax.jit(kernel)(jax.device_put(x, second), jax.device_put(length, second))
    assert got.devices() == {second}
    _check(got, x, length)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(kernel, in_specs=(spec, spec), out_specs=spec)
        _check(jax.jit(mapped)(x, length), x, length)
