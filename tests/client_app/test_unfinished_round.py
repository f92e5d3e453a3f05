"""A client that is killed in a round continues from its checkpoint when the round is repeated."""

import json
import os
import random
import shutil
import signal
from functools import partial
from multiprocessing import get_context

import pytest

from client_app import fedjudge
from client_app.unfinished_round import UnfinishedRound
from tests.in_process import run_in_process
from tests.marks import nightly
from tests.strategies.grids import same

STEPS = 4
TURNS = [{"role": "user", "content": ""}] * 60 + [{"role": "assistant", "content": "the"}]


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
def test_a_killed_client_s_round_equals_an_unbroken_one(values, tmp_path, caplog, changed, model):
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


@pytest.mark.slow
@pytest.mark.parametrize("change", ["learning rate", "library", "row", "damage"])
def test_other_inputs_and_a_damaged_file_begin_the_round_anew(
    values, client_folders, tmp_path, caplog, monkeypatch, change
):
    values |= {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": STEPS}
    values |= {"train.checkpoint-minutes": 1e-9, "data.path": str(tmp_path / "data")}
    rows = shutil.copytree(client_folders, tmp_path / "data") / "alpha" / "train.jsonl"
    killed(partial(run_in_process, values, tmp_path / "killed", 3))
    if change == "learning rate":
        values |= {"train.learning-rate": 1e-5}
    elif change == "library":
        metadata = tmp_path / "newer" / "peft-99.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: peft\nVersion: 99.0\n")
        monkeypatch.syspath_prepend(tmp_path / "newer")
    elif change == "row":  # a row without an example, because its template doesn't fit
        with rows.open("a") as file:
            file.write(json.dumps({"messages": TURNS}) + "\n")
    else:
        (file,) = (tmp_path / "killed").rglob("unfinished/adapter.safetensors")
        file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level("INFO"):
        found = run_in_process(values, tmp_path / "killed", 3)
    assert "continuing" not in caplog.text
    assert same(found.adapters[1], run_in_process(values, tmp_path / "other", 3).adapters[1])


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
