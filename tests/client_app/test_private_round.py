"""A private round that is killed continues with the same rows and noise, and spends ε once."""

import os
import random
import shutil
import signal
from multiprocessing import get_context
from pathlib import Path

import pytest
from filelock import FileLock

from client_app import fedjudge
from client_app.privacy_account import PrivateSteps, epsilon
from client_app.unfinished_round import UnfinishedRound
from strategies.participants import RefusedError, TooFewClientsError
from tests.client_app.test_privacy import Sites, lines
from tests.in_process import MemoryJournal
from tests.marks import nightly
from tests.strategies.grids import same, start

STEPS, NOISE, RATE, DELTA = 6, 2.0, 4 / 24, 1e-3  # alpha has 24 rows
ONE_ROUND = epsilon([PrivateSteps(RATE, NOISE, STEPS)], DELTA) * 1.0001


class Killing(UnfinishedRound):
    """Store a checkpoint after step ``saved``, and kill this process after step ``last``."""

    saved = last = 0

    def save_if_due(self, progress, parameters, optimizer):
        if self._draw and len(progress.losses) == self.saved:
            super().save_if_due(progress, parameters, optimizer)
        if self._draw and len(progress.losses) == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def train(values, folders, policy) -> dict:
    """Train for one round; return alpha's adapter."""
    journal = MemoryJournal()
    start(values, Sites(values, folders, {"alpha": policy}), journal)
    return journal.kept["alpha"]


def train_until_killed(saved, last, *arguments):
    Killing.saved, Killing.last = saved, last
    fedjudge.UnfinishedRound = Killing
    train(*arguments)


@pytest.fixture
def killed(values, client_folders, checkpoint, tmp_path):
    """Return a function that kills a round, and returns the arguments to repeat it."""

    def kill(saved: int, last: int) -> tuple[dict, Path, Path]:
        site = tmp_path / "site"
        site.mkdir()
        policy = site / "policy.toml"
        policy.write_text(
            f'paths = ["{checkpoint}", "{tmp_path}"]\naudit-log = "{site / "audit.jsonl"}"\n'
            f"[privacy]\nepsilon = {ONE_ROUND}\ndelta = {DELTA}\nnoise-multiplier = {NOISE}\n"
            f'account = "{site / "privacy.jsonl"}"\n'
        )
        own = {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": STEPS}
        own |= {"train.checkpoint-minutes": 1e-9, "data.path": ""}
        arguments = values | own | {"state-path": str(tmp_path / "state")}, client_folders, policy
        target, parts = train_until_killed, (saved, last, *arguments)
        process = get_context("spawn").Process(target=target, args=parts)
        process.start()
        process.join(300)
        assert process.exitcode == -signal.SIGKILL
        return arguments

    return kill


def restored(tmp_path: Path, name: str) -> None:
    shutil.rmtree(tmp_path / name)
    shutil.copytree(tmp_path / "backup" / name, tmp_path / name)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint_exists", [nightly(False), True])
def test_a_killed_private_round_equals_an_unbroken_one(killed, tmp_path, caplog, checkpoint_exists):
    saved = random.randrange(1, STEPS) if checkpoint_exists else 0
    arguments = killed(saved, random.randrange(max(saved, 1), STEPS))
    account = tmp_path / "site" / "privacy.jsonl"
    (key,) = (tmp_path / "state").rglob("private-round.json")
    assert key.stat().st_mode & 0o077 == 0
    for name in ("site", "state"):
        shutil.copytree(tmp_path / name, tmp_path / "backup" / name)
    with caplog.at_level("INFO"):
        continued = train(*arguments)
    assert (f"alpha, round 1: continuing after step {saved}" in caplog.text) is (saved > 0)
    assert [line["steps"] for line in lines(account)] == [STEPS]
    assert not list((tmp_path / "state").rglob("private-round.json"))
    assert not list((tmp_path / "state").rglob("unfinished"))

    # A round with the same key, from its first step.
    for name in ("site", "state"):
        restored(tmp_path, name)
    for folder in list((tmp_path / "state").rglob("unfinished")):
        shutil.rmtree(folder)
    assert same(train(*arguments), continued)

    # The key of an adapter that was sent isn't used again, even if a backup restores it.
    restored(tmp_path, "state")
    with pytest.raises(RefusedError, match=r"alpha.*0 are left"):
        train(*arguments)
    policy = arguments[2]
    policy.write_text(policy.read_text().replace(f"epsilon = {ONE_ROUND}", "epsilon = 20.0"))
    assert not same(train(*arguments), continued)
    assert [line["steps"] for line in lines(account)] == [STEPS, STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("change", ["policy", nightly("adapter"), "running"])
def test_other_inputs_and_processes_have_other_noise(killed, tmp_path, change):
    values, folders, policy = killed(1, 2)
    (file,) = (tmp_path / "state").rglob("private-round.json")
    key = file.read_bytes()
    if change == "running":
        with (
            FileLock(f"{file}.lock"),
            pytest.raises(TooFewClientsError, match="alpha: another process trains a private"),
        ):
            train(values, folders, policy)
        assert file.read_bytes() == key
        return
    text = policy.read_text().replace(f"epsilon = {ONE_ROUND}", "epsilon = 20.0")
    if change == "adapter":
        values |= {"seed": 1}
    else:
        text = text.replace("[privacy]", "[privacy]\nrow-norm = 0.5")
    policy.write_text(text)
    train(values, folders, policy)
    draws = [e["draw"] for e in lines(policy.with_name("audit.jsonl")) if e["event"] == "privacy"]
    assert len(set(draws)) == len(lines(policy.with_name("privacy.jsonl"))) == 2
