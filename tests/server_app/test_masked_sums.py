"""Runs with masked sums: equal to runs without, resumable, and without a client's adapter."""

from functools import partial

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from safetensors.torch import load_file

from chambers.in_process import InProcessGrid
from federation.messages import ARRAYS
from federation.sums.masks import CHECK
from finetuning.aggregation.robust_aggregation import distance
from strategies.participants import TooFewClientsError
from tests.conftest import write_rows
from tests.marks import nightly
from tests.server_app.runs import Altered, events, final, folders, newest, run, serve
from tests.strategies.grids import same

SUMS = {"sums.enabled": True}
NAME = "mean of alpha, beta, gamma"


@pytest.mark.parametrize(
    "strategy", ["fedjudge-cl", nightly("fedprox"), nightly("fedjudge-base")], ids=str
)
def test_a_masked_run_equals_an_unmasked_one(values, tmp_path, strategy):
    values |= {"strategy": strategy, "train.max-gradient-norm": 1.0}
    if strategy == "fedprox":
        values["fedprox.mu"] = 0.1
    plain, masked = (
        serve(values | folders(tmp_path / name) | more)
        for name, more in (("plain", {}), ("masked", SUMS))
    )
    one, other = (
        load_file(d / "adapters/global/adapter_model.safetensors") for d in (plain, masked)
    )
    difference = distance(one, other)
    assert difference <= 1e-6 * distance(one, {name: 0 * value for name, value in one.items()})
    losses = {
        (e["client"], e["round"], e["model"]): e.get("loss")
        for e in events(plain)
        if e["event"] == "evaluate"
    }
    sums = [e for e in events(masked) if e["event"] == "evaluate"]
    assert {e["client"] for e in sums} == {NAME}
    assert {e["model"] for e in sums} == {"base", "global", "personalised"}
    for e in sums:
        own = {n: losses[n, e["round"], e["model"]] for n in ("alpha", "beta", "gamma")}
        mean = sum(w * own[n] for n, w in (("alpha", 24), ("beta", 12), ("gamma", 8))) / 44
        assert e["loss"] == pytest.approx(mean, abs=1e-5)


def test_no_adapter_of_a_client_is_at_the_coordinator(values, tmp_path):
    values |= folders(tmp_path / "runs") | SUMS | {"rounds": 2}
    directory = serve(values)
    trained = [
        value
        for file in (tmp_path / "runs-state").rglob("adapter.safetensors")
        for name, value in load_file(file).items()
        if "lora_B" in name
    ]
    assert trained
    content = b"".join(f.read_bytes() for f in directory.rglob("*") if f.is_file())
    for value in trained:
        assert value.numpy().tobytes()[:32] not in content
    assert not (directory / "adapters" / "clients").exists()
    assert "no client&#39;s adapter" in (directory / "report.html").read_text().replace(
        "'", "&#39;"
    )
    assert "Local training" not in (directory / "report.html").read_text()
    assert NAME in (directory / "summary.txt").read_text()
    # The key for the run's masks is deleted after the final evaluation.
    assert not list((tmp_path / "runs-state").rglob("sum-key"))


@pytest.mark.parametrize(
    "stop",
    [{"stop_before": 2}, {"stop_after": (2, False)}, nightly({"stop_after": (1, True)})],
    ids=str,
)
def test_resumed_equals_unbroken(values, tmp_path, stop):
    """The coordinator is killed before or after the round's checkpoint, or after its evaluation."""
    here, there = folders(tmp_path / "a"), folders(tmp_path / "b")
    unbroken = run(values | SUMS | here)
    broken = run(values | SUMS | there, **stop)
    assert run(values | SUMS | there | {"resume": str(broken)}) == broken
    assert same(final(unbroken), final(broken))
    assert events(unbroken) == events(broken)


def fail(replies):
    """Let the first client fail."""
    about = {"name": replies[0].content["config"]["name"], "problem": "the disk is full"}
    replies[0].content = RecordDict({"config": ConfigRecord(about)})
    return replies


def spoil(replies):
    for reply in replies:
        if reply.content["config"]["name"] == "beta":
            arrays = dict(reply.content[ARRAYS].items())
            arrays[CHECK] = Array(arrays[CHECK].numpy() + np.uint64(1))
            reply.content[ARRAYS] = ArrayRecord(arrays)
    return replies


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (fail, "its group is incomplete: alpha failed"),
        (spoil, r"the sum of its group \(alpha, beta, gamma\) can't be used: its members have not"),
    ],
)
def test_a_group_takes_part_whole_or_not_at_all(values, tmp_path, change, reason):
    values |= folders(tmp_path / "runs") | SUMS
    grid = partial(Altered, about=("train", 2), change=change)
    with pytest.raises(TooFewClientsError, match=reason):
        run(values, kind=grid)
    (left,) = [e for e in events(newest(values)) if e["event"] == "round" and e["round"] == 2]
    assert {each["client"] for each in left["left_out"]} == {"alpha", "beta", "gamma"}


def test_other_groups_continue_without_an_incomplete_one(values, tmp_path):
    for number in range(8):
        write_rows(tmp_path / "rows" / f"c{number}" / "train.jsonl", 4 + number, number)
        write_rows(tmp_path / "rows" / f"c{number}" / "test.jsonl", 2, number)
    values |= (
        folders(tmp_path / "runs")
        | SUMS
        | {
            **{"strategy": "fedjudge-base", "rounds": 1, "min-nodes": 4},
            **{"data.path": str(tmp_path / "rows"), "evaluate.every": 2},
        }
    )
    nodes = {i + 1: {"partition-id": i, "num-partitions": 8} for i in range(8)}
    whole = serve(values, Altered(values, nodes, ("train", 1), lambda replies: replies))
    lacking = serve(values, Altered(values, nodes, ("train", 1), fail))
    groups = [[f"c{i}" for i in range(k, 8, 2)] for k in (0, 1)]
    (both,) = [e for e in events(whole) if e["event"] == "round"]
    (one,) = [e for e in events(lacking) if e["event"] == "round"]
    assert both["participants"] == sorted(groups[0] + groups[1])
    assert one["participants"] == groups[1]
    assert {left["client"] for left in one["left_out"]} == set(groups[0])
    adapters = final(lacking)
    assert any(torch.any(adapters[n] != value) for n, value in final(whole).items())


def test_whole_groups_are_drawn(values, tmp_path):
    for number in range(8):
        write_rows(tmp_path / "rows" / f"c{number}" / "train.jsonl", 4, number)
        write_rows(tmp_path / "rows" / f"c{number}" / "test.jsonl", 2, number)
    values |= folders(tmp_path / "runs") | SUMS
    values |= {"strategy": "fedjudge-base", "rounds": 4, "sample": 0.5, "evaluate.every": 4}
    values["data.path"] = str(tmp_path / "rows")
    nodes = {i + 1: {"partition-id": i, "num-partitions": 8} for i in range(8)}
    directory = serve(values, InProcessGrid(values, nodes))
    drawn = [e["participants"] for e in events(directory) if e["event"] == "round"]
    assert all(len({int(name[1]) % 2 for name in names}) == 1 for names in drawn)
    assert all(len(names) == 4 for names in drawn)
    assert not any(e["left_out"] for e in events(directory) if e["event"] == "round")
    assert len({tuple(names) for names in drawn}) == 2
