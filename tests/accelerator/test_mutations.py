"""Whether the tests of this folder notice a conversion that is missing."""

import re
import subprocess
import sys

import pytest

from tests.client_app.worker_process import ROOT


@pytest.mark.accelerator
@pytest.mark.nightly
def test_missing_conversions_are_noticed(device):
    """Run in a separate process, because the project is already imported here."""
    command = [sys.executable, "-m", "tests.accelerator.mutations"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    listed = re.search(r"^\d+ of (\d+) noticed", result.stdout, re.MULTILINE)
    assert listed is not None and int(listed[1]) >= 40, "conversions are not found"
