"""Checking that a call is refused with a message that helps."""

import pytest


def assert_refused(function, call, name, value, message, error, *, blamed=()) -> None:
    """Requires `function(**call)` with another value of `name` to raise, saying what and where.

    Where two arguments disagree, either may be named: `blamed` holds the others.
    """
    with pytest.raises(error) as caught:
        function(**call | {name: value})
    text = str(caught.value)
    assert message in text
    assert any(each in text for each in (name, *blamed))


def names_of(cases):
    """Test ids of (call, name, value, message) cases."""
    return [f"{name}: {message}" for _, name, _, message in cases]
