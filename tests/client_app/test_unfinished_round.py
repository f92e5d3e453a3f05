"""A client that is killed in a round continues from its checkpoint when the round is repeated."""

import os
import random
import shutil
import signal
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace

import pytest

from client_app import fedjudge, unfinished_round
from client_app.unfinished_round import UnfinishedRound
from federation.messages import ARRAYS
from tests.in_process import run_in_process
from tests.marks import nightly
from tests.strategies.grids import same

STEPS = 4


class Killing(UnfinishedRound):
    """Kill this process after the checkpoint of one of alpha's steps."""

    step: int

    def save_if_due(self, progress, parameters, optimizer):
        super().save_if_due(progress, parameters, optimizer)
        if self._task.institution.name == "alpha" and len(progress.losses) == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(run, step):
    fedjudge.UnfinishedRound, Killing.step = Killing, step
    run()


def killed(run):
    """Kill a run after a random step, and return the step."""
    step = random.randrange(1, STEPS)
    process = get_context("spawn").Process(target=run_until_killed, args=(run, step))
    process.start()
    process.join(900)
    assert process.exitcode == -signal.SIGKILL
    return step


@pytest.mark.slow
@pytest.mark.parametrize("model", ["", nightly("smollm2")])
@pytest.mark.parametrize(
    "changed",
    [
        nightly({"strategy": "fedjudge-base", "evaluate.alone": True}),
        {"strategy": "fedjudge-cl", "continual.share": 0.2, "train.optimizer-state": "keep"},
        nightly({"strategy": "fedprox", "fedprox.mu": 0.1}),
    ],
    ids=lambda changed: changed["strategy"],
)
def test_a_round_of_a_killed_client_equals_an_unbroken_one(
    values, tmp_path, caplog, changed, model
):
    values |= changed | {"rounds": 2, "train.local-steps": STEPS}
    values |= {"model.name": model} if model else {}
    values |= {"adapter.dropout": 0.1, "train.checkpoint-minutes": 1e-9}
    first = run_in_process(values, tmp_path / "unbroken", 3, rounds=1)
    begun = first.progress, first.adapters[1]
    shutil.copytree(tmp_path / "unbroken", tmp_path / "killed")
    unbroken = run_in_process(values, tmp_path / "unbroken", 3, start=begun)
    again = partial(run_in_process, values, tmp_path / "killed", 3, start=begun)
    step = killed(again)
    with caplog.at_level("INFO"):
        continued = again()
    assert f"alpha, round 2: continuing after step {step}" in caplog.text
    assert same(continued.adapters[2], unbroken.adapters[2])
    assert all(same(continued.kept[name], unbroken.kept[name]) for name in unbroken.kept)
    losses = [
        [e["loss"] for e in journal.events if e["event"] in {"train", "evaluate"}]
        for journal in (continued, unbroken)
    ]
    assert losses[0] == losses[1]
    assert not list((tmp_path / "killed").rglob("unfinished"))


@pytest.fixture
def unfinished(values, tmp_path, monkeypatch):
    """Train a round with a minute per step, and keep its checkpoint.

    Return alpha's task, and the number of the steps in the checkpoint after each step.
    """
    clock, tasks, counts = SimpleNamespace(now=0.0), [], []

    class Keeping(UnfinishedRound):
        def save_if_due(self, *arguments):
            clock.now += 60.0
            super().save_if_due(*arguments)
            if self._task.institution.name == "alpha":
                found = self.load()
                counts.append(len(found[0].losses) if found else 0)
                tasks.append(self._task)

        def remove(self):
            pass

    monkeypatch.setattr(unfinished_round, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(fedjudge, "UnfinishedRound", Keeping)
    values |= {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": 6}
    run_in_process(values | {"train.checkpoint-minutes": 2.0}, tmp_path, 3)
    return tasks[0], counts


def test_a_checkpoint_is_stored_only_when_it_is_due(unfinished):
    assert unfinished[1] == [0, 2, 2, 4, 4]


def test_other_inputs_and_a_damaged_file_begin_the_round_anew(unfinished, tmp_path, monkeypatch):
    task, _ = unfinished
    assert UnfinishedRound(task).load()
    (first, *others), own = task.institution.train, task.config
    settings = own.train.model_copy(update={"learning_rate": 1e-5})
    weights = {name: value + 1 for name, value in task.arrays[ARRAYS].items()}
    for changed in (
        {"config": own.model_copy(update={"train": settings})},
        {"arrays": {ARRAYS: weights}},
        *(
            {"institution": replace(task.institution, **change)}
            for change in (
                {"size": task.institution.size + 1},  # a row without an example
                {"train": [replace(first, tokens=first.tokens.flip(0)), *others]},
                {"train": [replace(first, is_target=first.is_target.flip(0)), *others]},
            )
        ),
    ):
        assert UnfinishedRound(replace(task, **changed)).load() is None, changed
    assert UnfinishedRound(task, "the key of a private round").load() is None
    for name in ("progress.json", "adapter.safetensors", "optimizer.safetensors"):
        (file,) = task.state.directory.rglob(f"unfinished/{name}")
        whole = file.read_bytes()
        for damaged in (b"", b"{}", b"3", b"[1]", whole[: len(whole) // 2]):
            file.write_bytes(damaged)
            assert UnfinishedRound(task).load() is None, (name, damaged)
        file.write_bytes(whole)
    assert UnfinishedRound(task).load()
    metadata = tmp_path / "newer" / "peft-99.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(tmp_path / "newer")
    assert UnfinishedRound(task).load() is None


def test_a_full_disk_costs_only_the_checkpoint(values, tmp_path, caplog):
    """The checkpoint's folder can't be written, because there is a file in its place."""
    values |= {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": 2}
    expected = run_in_process(values, tmp_path / "one", 3)
    lineage = next((tmp_path / "one").iterdir()).name
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / "two" / lineage / name).mkdir(parents=True)
        (tmp_path / "two" / lineage / name / "unfinished").write_text("")
    found = run_in_process(values | {"train.checkpoint-minutes": 1e-9}, tmp_path / "two", 3)
    assert "the checkpoint can't be written" in caplog.text
    assert same(found.adapters[1], expected.adapters[1])
