"""Run tests with two fake devices: ``python -m pytest -p tests.accelerator.plugin``.

pytest imports a plugin of its command line before any test or ``conftest.py``, so torch has the
devices when the project is imported.
"""

import os

import pytest
import torch

from tests.accelerator.device import FakeAccelerator, NotBuiltError, install

DEVICE = pytest.StashKey[FakeAccelerator | str]()

try:
    _found: FakeAccelerator | str = install()
except NotBuiltError as error:
    _found = str(error)


def pytest_configure(config: pytest.Config) -> None:
    """Store the devices, or the reason why there are none, for the fixtures."""
    config.stash[DEVICE] = _found
    # CI installs a compiler, so a missing one is an error there.
    if isinstance(_found, str) and "CHAMBERS_CI" in os.environ and not torch.version.cuda:
        raise pytest.UsageError(_found)
