"""The machinery under every JAX transformation, on a tiny operator."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.core.row_sum import row_sum
from tests.tolerances import ROW_SUM

RNG = np.random.default_rng(0)


def _inputs(batch=8, columns=5, lead=()):
    x = RNG.standard_normal((*lead, batch, columns)).astype(np.float32)
    length = RNG.integers(0, columns + 1, (*lead, batch)).astype(np.int32)
    return x, length


def _expected(x, length):
    """Independent of the operator: masks in float64."""
    keep = np.arange(x.shape[-1]) < length[..., None]
    return np.where(keep, x, 0).astype(np.float64).sum(-1)


def _check(got, x, length):
    np.testing.assert_allclose(np.asarray(got), _expected(x, length), **ROW_SUM)


def test_eager_and_jit():
    x, length = _inputs()
    _check(row_sum(x, length), x, length)
    _check(jax.jit(row_sum)(x, length), x, length)


def test_eval_shape():
    x, length = _inputs()
    out = jax.eval_shape(row_sum, x, length)
    assert (out.shape, out.dtype) == ((8,), jnp.float32)


def test_vmap_nested():
    x, length = _inputs(lead=(3, 2))
    _check(jax.vmap(jax.vmap(row_sum))(x, length), x, length)


def test_vmap_with_a_shared_operand():
    x, length = _inputs(lead=(3,))
    shared = length[0]
    _check(jax.vmap(row_sum, (0, None))(x, shared), x, np.stack([shared] * 3))
    _check(jax.vmap(row_sum, (None, 0))(x[0], length), np.stack([x[0]] * 3), length)


def test_vmap_axis_positions():
    x, length = _inputs(lead=(3,))
    got = jax.vmap(row_sum, in_axes=(1, 1), out_axes=1)(
        np.moveaxis(x, 0, 1), np.moveaxis(length, 0, 1)
    )
    _check(np.moveaxis(got, 1, 0), x, length)


def test_vmap_over_nothing():
    assert jax.vmap(row_sum)(jnp.ones((0, 8, 5)), jnp.ones((0, 8), jnp.int32)).shape == (0, 8)


def test_empty_sizes():
    assert row_sum(jnp.ones((0, 5)), jnp.ones((0,), jnp.int32)).shape == (0,)
    np.testing.assert_array_equal(row_sum(jnp.ones((2, 0)), jnp.ones((2,), jnp.int32)), [0, 0])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("jit", [False, True])
def test_shard_map(axis_type, jit):
    x, length = _inputs()
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    x_sharded, length_sharded = (
        jax.device_put(a, NamedSharding(mesh, P("x"))) for a in (x, length)
    )
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(row_sum, in_specs=(P("x"), P("x")), out_specs=P("x"))
        _check((jax.jit(mapped) if jit else mapped)(x_sharded, length_sharded), x, length)


def test_shard_map_with_a_replicated_operand():
    x, _ = _inputs()
    length = np.array([3], np.int32)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        got = jax.shard_map(row_sum, in_specs=(P("x"), P()), out_specs=P("x"))(x, length)
    _check(got, x, np.full(8, 3))


@pytest.mark.parametrize("in_specs", [(P("x"), P()), (P(), P("x"))])
def test_shard_map_refuses_wrong_out_specs(in_specs):
    """A result that differs between devices must not pass for a replicated one."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    x, length = np.ones((8, 5), np.float32), np.ones(8, np.int32)
    if in_specs[0] == P():
        x = x[:1]
    else:
        length = length[:1]
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(row_sum, in_specs=in_specs, out_specs=P())(x, length)


def test_explicitly_sharded_operand_says_use_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    x, length = _inputs()
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"row_sum: x .*shard_map"):
        row_sum(jax.device_put(x, NamedSharding(mesh, P("x"))), length)


def test_pmap():
    x, length = _inputs(lead=(8,))
    _check(jax.pmap(row_sum)(x, length), x, length)


def test_scan():
    x, length = _inputs(lead=(3,))
    _, got = jax.lax.scan(lambda carry, xs: (carry, row_sum(*xs)), 0, (x, length))
    _check(got, x, length)


def test_while_loop_with_traced_length():
    x, _ = _inputs()

    def body(state):
        step, total = state
        return step + 1, total + row_sum(x, jnp.full((8,), step))

    _, got = jax.jit(lambda: jax.lax.while_loop(lambda s: s[0] < 4, body, (0, jnp.zeros(8))))()
    expected = sum(_expected(x, np.full(8, step)) for step in range(4))
    np.testing.assert_allclose(got, expected, **ROW_SUM)


def test_checkpoint_and_donation():
    x, length = _inputs()
    _check(jax.checkpoint(row_sum)(x, length), x, length)
    donating = jax.jit(lambda x, length: (row_sum(x, length), x + 1), donate_argnums=0)
    got, _ = donating(jnp.asarray(x), length)
    _check(got, x, length)


def test_x64():
    x, length = _inputs()
    with jax.enable_x64(True):
        _check(jax.jit(row_sum)(jnp.asarray(x), jnp.asarray(length)), x, length)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd, jax.linearize])
def test_gradient_is_refused(transform):
    x, length = _inputs()

    def loss(x):
        return row_sum(x, length).sum()

    with pytest.raises(NotImplementedError, match=r"row_sum is forward-only.*jnp\.sum"):
        transform(loss)(x) if transform is not jax.linearize else transform(loss, x)


def test_stop_gradient_and_unrelated_gradients_pass():
    x, length = _inputs()
    grad = jax.grad(lambda y: (y * row_sum(x, length)).sum())(jnp.ones(8))
    np.testing.assert_allclose(grad, _expected(x, length), **ROW_SUM)


@pytest.mark.parametrize("platforms", [["cpu"], ["cuda"], ["cpu", "cuda"]])
def test_export_of_the_reference(platforms):
    x, length = _inputs()
    reference = functools.partial(row_sum, implementation="reference")
    exported = jax.export.export(jax.jit(reference), platforms=platforms)(x, length)
    loaded = jax.export.deserialize(exported.serialize())
    assert loaded.platforms == tuple(platforms)
    if "cpu" in platforms:
        _check(loaded.call(x, length), x, length)


def test_implementation_for_another_platform_is_refused():
    x, length = _inputs()
    with pytest.raises(ValueError, match=r"implementation='triton' runs on CUDA GPUs only.*cpu"):
        jax.jit(functools.partial(row_sum, implementation="triton"))(x, length)
    with pytest.raises(ValueError, match=r"implementation: got 'cuda', expected one of"):
        row_sum(x, length, implementation="cuda")
