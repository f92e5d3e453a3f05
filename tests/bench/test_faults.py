"""The measurement of faults, with one of them."""

import json

import pytest

from bench.faults import main

pytestmark = pytest.mark.slow


def test_a_run_survives_a_fault_and_the_table_says_so(nginx, tmp_path, capsys):
    main([str(tmp_path), "--runs", "1", "--rounds", "1"])
    (record,) = tmp_path.glob("run-*.json")
    outcome = json.loads(record.read_text())
    assert outcome["faults"] == []
    assert outcome["adapter"] == "undisturbed run" or outcome["adapter"].startswith("average")
    assert f"{outcome['way']}, {outcome['process']}" in capsys.readouterr().out
    # What is recorded is not measured again.
    main([str(tmp_path), "--runs", "1", "--rounds", "1"])
