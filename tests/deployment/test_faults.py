"""The measurement of faults, with a single killed process."""

import json
import re

import pytest

from tests.deployment.faults import main

pytestmark = pytest.mark.nightly


def test_a_run_survives_a_fault_and_the_table_says_so(nginx, tmp_path, capsys):
    main([str(tmp_path), "--runs", "1", "--rounds", "1"])
    (record,) = tmp_path.glob("run-*.json")
    outcome = json.loads(record.read_text())
    assert outcome["faults"] == []
    assert outcome["adapter"] == "undisturbed run" or outcome["adapter"].startswith("average")
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.startswith(f"| {outcome['process']} "))
    assert re.findall(r"1\+0|0\+1", row)
    assert "1 runs" in printed and "faults: none" in printed
    # A recorded run is not repeated.
    main([str(tmp_path), "--runs", "1", "--rounds", "1"])
