"""The demonstration as it is; that it can be interrupted is tested with ``chambers train``."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def start_demo(tmp_path: Path, overrides: str = "") -> psutil.Popen:
    folders = f'output-dir="{tmp_path / "runs"}" state-path="{tmp_path / "state"}"'
    return psutil.Popen(
        [sys.executable, "-m", "chambers.demo", f"{folders} {overrides}"],
        cwd=ROOT,
        stdout=(tmp_path / "output").open("wb"),
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize(
    "overrides", ["rounds=2", 'strategy="fl-glm" rounds=2 evaluate.generate=false']
)
def test_everyone_gains_from_the_demo(tmp_path, left_over, overrides):
    demo = start_demo(tmp_path, overrides)
    assert demo.wait(1500) == 0, (tmp_path / "output").read_text()[-3000:]
    (directory,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    losses = {(e["client"], e["model"]): e["loss"] for e in events if e["event"] == "evaluate"}
    for client in ("court", "consultation", "reasoning"):
        assert losses[client, "global"] < losses[client, "base"]
        assert losses[client, "personalised"] <= losses[client, "global"]
    assert "run finished:completed" in (tmp_path / "output").read_text()
    assert not left_over()
