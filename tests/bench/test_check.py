import jax.numpy as jnp
import numpy as np
import pytest

from bench.check import relative_error


def test_relative_frobenius_norm():
    reference = jnp.array([[3.0, 0.0], [0.0, 4.0]])
    assert relative_error(reference, reference) == 0.0
    assert relative_error(reference.at[0, 1].set(0.5), reference) == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_bad_element_fails_any_tolerance(bad):
    reference = jnp.ones((2, 3))
    error = relative_error(reference.at[1, 1].set(bad), reference)
    assert not error <= 1e30


def test_bf16_is_compared_in_float32():
    reference = jnp.linspace(1.0, 2.0, 1000)
    assert 1e-4 < relative_error(reference.astype(jnp.bfloat16), reference) < 4e-3


def test_a_bad_reference_is_refused():
    for reference in (jnp.zeros(3), jnp.array([1.0, np.nan]), jnp.array([1.0, np.inf])):
        with pytest.raises(ValueError, match="norm"):
            relative_error(reference, reference)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        relative_error(jnp.ones((3, 1)), jnp.ones((1, 3)))
