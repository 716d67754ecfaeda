"""Argument checks: what passes, what is converted to what, and what is refused."""

import fractions
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_beam_attn._core import checks

TOP, BOTTOM = 2**31 - 1, -(2**31)


@pytest.mark.parametrize(
    "values, want",
    [
        (5, 5),
        (2**70, TOP),
        (-(2**70), BOTTOM),
        (np.int64(2**32), TOP),
        ([1, -1], [1, -1]),
        (np.array([2**32 + 1, -(2**33), 7]), [TOP, BOTTOM, 7]),
        (np.array([2**64 - 1, 3], np.uint64), [TOP, 3]),
        (np.array([255, 3], np.uint8), [255, 3]),
        (np.array([2**32 - 1, 3], np.uint32), [TOP, 3]),
        (np.array([-128, 127], np.int8), [-128, 127]),
    ],
    ids=str,
)
def test_int32_of_numpy_and_python(values, want):
    got = checks.int32("x", values)
    assert isinstance(got, jax.Array)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int16, jnp.uint8, jnp.uint16, jnp.uint32])
@pytest.mark.parametrize("jit", [False, True])
def test_int32_of_jax_arrays_of_other_widths(dtype, jit):
    """Bounds that the dtype cannot hold must not wrap around in it."""
    limits = jnp.iinfo(dtype)
    values = jnp.array([limits.min, 0, 3, limits.max], dtype)
    function = jax.jit(lambda x: checks.int32("x", x)) if jit else lambda x: checks.int32("x", x)
    got = function(values)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, [int(limits.min), 0, 3, min(int(limits.max), TOP)])


@pytest.mark.parametrize("jit", [False, True])
def test_int32_of_int64(jit):
    function = jax.jit(lambda x: checks.int32("x", x)) if jit else lambda x: checks.int32("x", x)
    with jax.enable_x64(True):
        got = function(jnp.array([2**32, -(2**32), 2**31, 4]))
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, [TOP, BOTTOM, TOP, 4])


@pytest.mark.parametrize("values", [1.0, [1.5], True, np.array([True]), None, "1"], ids=str)
def test_int32_refuses(values):
    with pytest.raises(TypeError, match=r"^x: got dtype .*, expected int32 or int64$"):
        checks.int32("x", values)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, jnp.bfloat16])
def test_float32_converts(dtype):
    got = checks.float32("x", np.array([0.5, -np.inf]).astype(dtype), (2,))
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, [0.5, -np.inf])


def test_softmax_scale():
    assert checks.softmax_scale(None, 64) == (0.125, None)
    assert checks.softmax_scale(0.3, 64) == (0.3, None)
    assert checks.softmax_scale(np.float64(0.3), 64) == (0.3, None)
    static, traced = checks.softmax_scale(np.array(0.3), 64)
    assert static is None
    assert traced is not None
    assert (traced.shape, traced.dtype) == ((), jnp.float32)
    assert float(traced) == float(np.float32(0.3))


@pytest.mark.parametrize("value", [1, 0.5, 1e30, 1e-37, np.float32(2), fractions.Fraction(1, 3)])
def test_positive_passes(value):
    got = checks.positive("x", value)
    assert type(got) is float
    assert got == float(value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e31, 1e-39, -0.0], ids=str)
def test_positive_refuses_numbers(value):
    message = re.escape(f"x: got {value}, expected a number > 0")
    with pytest.raises(ValueError, match=f"^{message}"):
        checks.positive("x", value)


@pytest.mark.parametrize("value", [True, None, "1", np.ones(1), 1j], ids=str)
def test_positive_refuses_types(value):
    with pytest.raises(TypeError, match=r"^x: got .*, expected a Python number"):
        checks.positive("x", value)


def test_shape_takes_names_for_any_size():
    checks.shape("x", np.zeros((2, 0, 3)), (2, "N", 3))
    checks.shape("x", np.zeros(()), ())
    with pytest.raises(ValueError, match=r"^x: got shape \(2, 3\), expected \[2, N, 4\]$"):
        checks.shape("x", np.zeros((2, 3)), (2, "N", 4))
    with pytest.raises(ValueError, match=r"^x: got shape \(2, 3\), expected \[N, 4\]$"):
        checks.shape("x", np.zeros((2, 3)), ("N", 4))


def test_dtype_takes_abstract_values():
    checks.dtype("x", jax.ShapeDtypeStruct((1,), jnp.bfloat16), (jnp.float32, jnp.bfloat16))
    with pytest.raises(TypeError, match=r"^x: got dtype bfloat16, expected float32, float16$"):
        checks.dtype("x", jax.ShapeDtypeStruct((), jnp.bfloat16), (jnp.float32, jnp.float16))


@pytest.mark.parametrize("check", [checks.shape, checks.dtype])
def test_arrays_are_required(check):
    with pytest.raises(TypeError, match=r"^x: got list, expected an array$"):
        check("x", [1, 2], (2,))


def test_multiple_of():
    checks.multiple_of("x", 8, "y", 8)
    checks.multiple_of("x", 24, "y", 8)
    for count, divisor in ((0, 8), (12, 8), (4, 8), (4, 0), (-8, 8)):
        with pytest.raises(ValueError, match=rf"^x: got {count} with y = {divisor}, expected"):
            checks.multiple_of("x", count, "y", divisor)


def test_at_least_one():
    checks.at_least_one("x", 1)
    checks.at_least_one("x", np.int64(7))
    for value in (0, -1):
        with pytest.raises(ValueError, match=rf"^x: got {value}, expected >= 1$"):
            checks.at_least_one("x", value)
    for value in (1.0, "1", True):
        with pytest.raises(TypeError, match=r"^x: got \w+, expected an integer$"):
            checks.at_least_one("x", value)
