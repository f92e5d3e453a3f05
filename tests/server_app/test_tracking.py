"""Trackers receive a run's numbers at steps, and can't end the run."""

import os
import subprocess
import sys

import pytest

from federation.run_config import ConfigError, parse_run_config
from server_app.tracking import Tracking
from tests.client_app.worker_process import ROOT


def train(number, client, steps, loss):
    return {"event": "train", "round": number, "client": client, "steps": steps, "loss": loss}


EVENTS = [
    {"event": "evaluate", "round": 0, "client": "court", "model": "base", "loss": 4.0},
    {"event": "round", "round": 1},
    train(1, "court", 3, 3.0),
    train(1, "école", 5, 3.5),
    {"event": "evaluate", "round": 1, "client": "court", "model": "global", "loss": 2.0},
    train(1, "late", 4, 3.3),
    {"event": "round", "round": 2},
    train(2, "court", 3, 2.5),
]


def record(folder, config, events=EVENTS, before=()):
    tracking = Tracking(config, folder)
    tracking.resume(before)
    for event in events:
        tracking.record(event)
    tracking.close()


def curves(folder):
    """Return the (step, value) pairs of each client's curves in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for own in (folder / "tensorboard").iterdir():
        events = EventAccumulator(str(own))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[own.name, tag] = [(e.step, e.value) for e in events.Scalars(tag)]
    return found


@pytest.mark.parametrize("resumed", [0, 4, 6])
def test_tensorboard_shows_clients_over_steps(values, tmp_path, resumed):
    config = parse_run_config(values | {"report-to": "tensorboard"})
    record(tmp_path, config, EVENTS[resumed:], EVENTS[:resumed])
    found = curves(tmp_path)
    assert found["court", "train/loss"][-1] == (8, 2.5)
    if not resumed:
        assert found == {
            ("court", "train/loss"): [(5, 3.0), (8, 2.5)],
            ("court", "train/steps"): [(5, 3.0), (8, 3.0)],
            ("école", "train/loss"): [(5, 3.5)],
            ("école", "train/steps"): [(5, 5.0)],
            ("late", "train/loss"): [(5, pytest.approx(3.3))],
            ("late", "train/steps"): [(5, 4.0)],
            ("court", "evaluate/base/loss"): [(0, 4.0)],
            ("court", "evaluate/global/loss"): [(5, 2.0)],
        }


def test_a_tracker_that_is_not_installed_or_unknown_is_refused(values, tmp_path):
    with pytest.raises(ConfigError, match="report-to"):
        parse_run_config(values | {"report-to": "neptune"})
    with pytest.raises(ConfigError, match=r"wandb isn't installed.*pip install wandb"):
        Tracking(parse_run_config(values | {"report-to": "tensorboard, wandb"}), tmp_path)


def test_a_failing_tracker_does_not_end_the_run(values, tmp_path):
    (tmp_path / "tensorboard").write_text("a file instead of a folder")
    record(tmp_path, parse_run_config(values | {"report-to": "tensorboard"}))


RECORDS = """
import sys
from pathlib import Path

sys.path.append(sys.argv[2])  # after this environment's packages
from federation.run_config import parse_run_config
from tests.server_app.test_tracking import record

config = {"report-to": sys.argv[1], "state-path": "/a/private/place"}
record(Path("2026_run").absolute(), parse_run_config(config))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "package"), [("mlflow", "mlflow-skinny"), ("trackio", "trackio"), ("wandb", "wandb")]
)
def test_other_trackers_receive_the_numbers_without_paths(tmp_path, name, package):
    packages, written = tmp_path / "packages", tmp_path / "written"
    install = ["pip", "install", "--quiet", "--target", packages, package]
    subprocess.run([sys.executable, "-m", *install], check=True)
    written.mkdir()
    offline = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1"}
    offline |= {"MLFLOW_TRACKING_URI": f"file:{written}", "TRACKIO_DIR": str(written)}
    subprocess.run(
        [sys.executable, "-c", RECORDS, name, packages],
        cwd=written,
        env=os.environ | offline | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    files = [file for file in written.rglob("*") if file.is_file()]
    stored = b"".join(bytes(file) + file.read_bytes() for file in files)
    assert b"train/loss/court" in stored and b"fedjudge-base" in stored
    assert b"private/place" not in stored
