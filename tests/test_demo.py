"""The demonstration that ``make demo`` runs."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.marks import nightly

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("preset", "settings"),
    [
        ("demo.toml", ["rounds=1", "evaluate.every=1"]),
        nightly("tiny.toml", ["rounds=1"]),
        nightly("demo-split.toml", ["rounds=1", "evaluate.generate=false"]),
    ],
)
def test_everyone_gains_from_the_demonstrations(
    tmp_path, left_over, deep_checkpoint, preset, settings
):
    folders = [f"output-dir={tmp_path / 'runs'}", f"state-path={tmp_path / 'state'}"]
    if preset != "tiny.toml":
        settings = [f"model.name={deep_checkpoint}", *settings]
    demo = psutil.Popen(
        [sys.executable, "-m", "chambers", "train", f"presets/{preset}", *folders, *settings],
        cwd=ROOT,
        stdout=(tmp_path / "output").open("wb"),
        stderr=subprocess.STDOUT,
    )
    assert demo.wait(1500) == 0, (tmp_path / "output").read_text()[-3000:]
    (directory,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = {(e["client"], e["model"]): e["loss"] for e in events if e["event"] == "evaluate"}
    assert len({client for client, _ in losses}) == 3
    for client, _ in losses:
        assert losses[client, "global"] < losses[client, "base"]
        if preset == "tiny.toml":  # the others test on what other clients learn
            assert losses[client, "personalised"] <= losses[client, "global"]
    output = (tmp_path / "output").read_text()
    assert "run completed after" in output
    shown = "Held-out questions" in output
    assert shown == ("evaluate.generate=false" not in settings)
    assert len(output.splitlines()) <= 40
    assert "round 1 of 1: evaluated" in output
    assert "Warning" not in output and "(pid=" not in output and "INFO" not in output
    assert "ClientAppActor" in (directory / "log.txt").read_text()
    assert not left_over()
