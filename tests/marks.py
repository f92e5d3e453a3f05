"""Marks of parameters with which a test repeats what it checks with others."""

from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """Return parameters with which a test runs every night only."""
    return pytest.param(*values, marks=pytest.mark.nightly)
