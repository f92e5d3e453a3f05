"""A client that is killed in a round continues from its checkpoint when the round is repeated."""

import json
import os
import shutil
import signal
import threading
from contextlib import suppress
from functools import partial
from multiprocessing import get_context

import pytest

from tests.client_app.test_privacy import Sites, lines
from tests.in_process import MemoryJournal, run_in_process
from tests.marks import nightly
from tests.strategies.grids import same, start
from tests.waiting import wait_until

STEPS = 6


def steps_done(folder):
    """Return how many steps of an unfinished round are stored below a folder."""
    with suppress(FileNotFoundError, ValueError):
        (file,) = folder.rglob("alpha/unfinished/progress.json")
        return len(json.loads(file.read_text())["losses"])
    return 0


def run_until_killed(run, folder):
    """Run until a few steps of alpha's round are stored, and kill this process."""

    def kill():
        wait_until(lambda: steps_done(folder) >= 2, 120)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    run()


def killed(run, folder):
    process = get_context("spawn").Process(target=run_until_killed, args=(run, folder))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert 2 <= steps_done(folder) < STEPS


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        nightly({"strategy": "fedjudge-base", "evaluate.alone": True}),
        {"strategy": "fedjudge-cl", "continual.share": 0.2, "train.optimizer-state": "keep"},
        nightly({"strategy": "fedprox", "fedprox.mu": 0.1}),
    ],
    ids=lambda changed: changed["strategy"],
)
def test_a_killed_client_s_round_equals_an_unbroken_one(values, tmp_path, caplog, changed):
    values |= changed | {"rounds": 2, "train.local-steps": STEPS}
    values |= {"adapter.dropout": 0.1, "train.checkpoint-minutes": 1e-9}
    first = run_in_process(values, tmp_path / "unbroken", 3, rounds=1)
    begun = first.progress, first.adapters[1]
    shutil.copytree(tmp_path / "unbroken", tmp_path / "killed")
    unbroken = run_in_process(values, tmp_path / "unbroken", 3, start=begun)
    again = partial(run_in_process, values, tmp_path / "killed", 3, start=begun)
    killed(again, tmp_path / "killed")
    with caplog.at_level("INFO"):
        continued = again()
    assert "alpha, round 2: continuing after step" in caplog.text
    assert same(continued.adapters[2], unbroken.adapters[2])
    assert all(same(continued.kept[name], unbroken.kept[name]) for name in unbroken.kept)
    losses = [
        [e["loss"] for e in journal.events if e["event"] in {"train", "evaluate"}]
        for journal in (continued, unbroken)
    ]
    assert losses[0] == losses[1]
    assert not list((tmp_path / "killed").rglob("unfinished"))


@pytest.mark.slow
def test_other_inputs_begin_the_round_anew(values, tmp_path, caplog):
    values |= {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": STEPS}
    values |= {"train.checkpoint-minutes": 1e-9}
    killed(partial(run_in_process, values, tmp_path / "killed", 3), tmp_path / "killed")
    changed = values | {"train.learning-rate": 0.5 * values.get("train.learning-rate", 2e-4)}
    with caplog.at_level("INFO"):
        found = run_in_process(changed, tmp_path / "killed", 3)
    assert "continuing" not in caplog.text
    assert same(found.adapters[1], run_in_process(changed, tmp_path / "other", 3).adapters[1])


def run_private(settings, client_folders, policies):
    start(settings, Sites(settings, client_folders, policies), MemoryJournal())


@pytest.mark.slow
def test_no_private_step_is_counted_twice_or_drawn_again(
    settings, client_folders, policy, tmp_path
):
    settings |= {"rounds": 1, "train.local-steps": STEPS, "train.checkpoint-minutes": 1e-9}
    run = partial(run_private, settings, client_folders, {"alpha": policy(50.0)})
    killed(run, tmp_path / "state")
    (stored,) = (tmp_path / "state").rglob("alpha/unfinished/progress.json")
    drawn = json.loads(stored.read_text())["drawn"]
    assert len(drawn) == STEPS
    run()
    (spent,) = lines(tmp_path / "site" / "privacy.jsonl")
    assert spent["steps"] == STEPS
    assert not list((tmp_path / "state").rglob("unfinished"))
