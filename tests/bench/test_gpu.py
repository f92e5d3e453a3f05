"""The measurement for GPUs, run from end to end on a machine without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly


def test_it_runs_from_end_to_end():
    process = subprocess.run(
        [
            *(sys.executable, "-m", "bench.gpu", "--size", "tiny", "--device", "cpu"),
            *("--clients", "2", "--schedules", "client-batch", "--pairs", "1", "--columns", "16"),
            *("--separate", "--wire-dtypes", "int8", "--windows", "2"),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "client-batch" in process.stdout
