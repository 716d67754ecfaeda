"""Argument checks: each names the argument, what came and what was expected."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_INT32 = np.iinfo(np.int32)
# Factors of logits stay where float32 neither flushes them nor what is divided by them to zero.
_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), 1e30


def _is_array(name: str, value: Any) -> None:
    """Requires something with a shape and a dtype; lists and None have neither."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an array")


def shape(name: str, array: Any, expected: Sequence[int | str]) -> None:
    """Requires a shape; a string entry stands for any size and appears in the message."""
    _is_array(name, array)
    got = tuple(array.shape)
    fits = len(got) == len(expected) and all(
        isinstance(want, str) or size == want for size, want in zip(got, expected, strict=True)
    )
    if not fits:
        wanted = ", ".join(str(size) for size in expected)
        raise ValueError(f"{name}: got shape {got}, expected [{wanted}]")


def dtype(name: str, array: Any, expected: Sequence[Any]) -> None:
    """Requires one of several dtypes."""
    _is_array(name, array)
    if not any(array.dtype == want for want in expected):
        names = ", ".join(jnp.dtype(want).name for want in expected)
        raise TypeError(f"{name}: got dtype {array.dtype}, expected {names}")


def int32(name: str, values: Any) -> jax.Array:
    """Integers of any kind as int32, clamped into its range.

    NumPy arrays and Python integers are clamped before JAX sees them: without x64 mode it would
    wrap them to 32 bits, and an index past the end would come back as a valid one.
    """
    if isinstance(values, int) and not isinstance(values, bool):
        values = np.int32(min(max(values, _INT32.min), _INT32.max))
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"{name}: got dtype {values.dtype}, expected int32 or int64")
    if values.dtype == np.int32:
        return jnp.asarray(values)
    # Bounds that the dtype itself can hold: `clip` would wrap others into it.
    own = jnp.iinfo(values.dtype)
    low, high = max(int(own.min), int(_INT32.min)), min(int(own.max), int(_INT32.max))
    if isinstance(values, np.ndarray):
        return jnp.asarray(np.clip(values, low, high).astype(np.int32))
    return jnp.clip(values, low, high).astype(jnp.int32)


def float32(name: str, values: Any, expected_shape: Sequence[int | str]) -> jax.Array:
    """Floating-point numbers as float32, of a required shape."""
    try:
        values = jnp.asarray(values)
    except TypeError:
        raise TypeError(f"{name}: got {type(values).__name__}, expected float32") from None
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name}: got dtype {values.dtype}, expected float32")
    shape(name, values, expected_shape)
    return values.astype(jnp.float32)


def softmax_scale(value: Any, head_dim: int) -> tuple[float | None, jax.Array | None]:
    """A scale as (static, traced), one of the two; the default is head_dim**-0.5.

    A Python number is part of the compiled program, a 0-d array is read by it.
    """
    if value is None:
        return head_dim**-0.5, None
    if isinstance(value, numbers.Real):
        return positive("softmax_scale", value), None
    return None, float32("softmax_scale", value, ())


def positive(name: str, value: Any) -> float:
    """A Python number > 0, within limits that keep logits of float32 exact."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a Python number")
    number = float(value)
    if not (_SMALLEST <= number <= _LARGEST):
        raise ValueError(
            f"{name}: got {value}, expected a number > 0, from {_SMALLEST:.0e} to {_LARGEST:.0e}"
        )
    return number


def at_least_one(name: str, value: Any) -> None:
    """Requires a Python integer >= 1."""
    _at_least(1, name, value)


def at_least_zero(name: str, value: Any) -> None:
    """Requires a Python integer >= 0."""
    _at_least(0, name, value)


def _at_least(smallest: int, name: str, value: Any) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an integer")
    if value < smallest:
        raise ValueError(f"{name}: got {value}, expected >= {smallest}")


def plan_fields(plan: Any, **smallest: int) -> None:
    """Requires integers >= 1 where a plan's fields are integers and given.

    Args:
        plan: A frozen dataclass.
        **smallest: Fields that hold a power of two, and the smallest allowed.
    """
    for field in dataclasses.fields(plan):
        value = getattr(plan, field.name)
        if field.type == "int | None" and value is not None:
            at_least_one(f"plan.{field.name}", value)
    for name, least in smallest.items():
        allowed = [2**i for i in range(10) if 2**i >= least]
        one_of(f"plan.{name}", getattr(plan, name), (None, *allowed))


def multiple_of(name: str, count: int, other_name: str, divisor: int) -> None:
    """Requires `count` to be a positive multiple of `divisor`."""
    if divisor < 1 or count < 1 or count % divisor:
        raise ValueError(
            f"{name}: got {count} with {other_name} = {divisor}, expected a positive multiple"
        )


def one_of(name: str, value: Any, expected: Sequence[Any]) -> None:
    """Requires one of a few values."""
    if value not in expected:
        raise ValueError(f"{name}: got {value!r}, expected one of {list(expected)}")
