"""What tests of native code ask for."""

import pytest

from tests import native_code


@pytest.fixture
def built():
    """Skips, or in CI fails, where a part's library cannot be used."""
    return native_code.require
