"""Marks for test parameters whose checks largely repeat those of other parameters."""

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return parameters with which a test runs only at night."""
    return pytest.param(*values, marks=pytest.mark.nightly)
