"""The audit log contains a line for everything that a site sends, written before it is sent."""

import errno
import json
import multiprocessing
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from chambers.in_process import InProcessGrid
from client_app.audit import AuditError, AuditLog
from federation.messages import ARRAYS, METRICS
from tests.in_process import MemoryJournal, run_in_process
from tests.strategies.grids import NODES, SpyingGrid, start


def test_a_line_says_what_left(site):
    site.ask("query")
    reply = site.ask("train", changed={"train.local-steps": 2})
    site.ask("evaluate", importance=True, losses=True)
    query, train, evaluate = site.lines("reply")
    about = {"client": "court", "run": "run-1", "round": 1}
    for line, kind in ((query, "query"), (train, "train"), (evaluate, "evaluate")):
        assert line.items() >= (about | {"kind": kind}).items()
        assert line["time"].endswith("+00:00")
    assert query["digests"] > 2
    assert query["metrics"] == ["num-rows", "test-examples", "train-examples"]
    assert train["arrays"] == evaluate["arrays"] == sorted(reply.content[ARRAYS])
    assert train["metrics"] == sorted(reply.content[METRICS])
    assert train["array-bytes"] == sum(len(a.data) for a in reply.content[ARRAYS].values())
    assert "global.loss" in evaluate["metrics"] and evaluate["norm"] > 0
    (sent,) = (p for p in (site.folder / "state").rglob("adapter.safetensors"))
    assert train["distance"] > 0 and sent.is_file()
    text = site.log.read_text()
    assert "upheld" not in text and "Repeat" not in text  # words of the rows
    assert site.log.stat().st_mode & 0o077 == 0


def test_the_log_has_the_distance_of_a_trained_adapter(values, client_folders, tmp_path):
    policy, log = tmp_path / "policy.toml", tmp_path / "audit.jsonl"
    own = values | {"strategy": "fedjudge-base", "rounds": 1, "min-nodes": 1}
    del own["data.path"]
    folders = json.dumps([own["model.name"], str(tmp_path)])
    policy.write_text(f'audit-log = "{log}"\npaths = {folders}\n')
    data = str(client_folders / "alpha")
    nodes = {1: {"name": "court", "data-path": data, "policy": str(policy)}}

    class Keeping(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            replies = list(super().send_and_receive(messages))
            if messages[0].metadata.message_type == "train":
                pairs.append((messages[0].content[ARRAYS], replies[0].content[ARRAYS]))
            return replies

    pairs = []
    state = {"state-path": str(tmp_path / "state")}
    run_in_process(own, tmp_path / "state", 1, Keeping(own | state, nodes))
    ((before, after),) = pairs
    difference = [(after[name].numpy() - before[name].numpy()).ravel() for name in before]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    (line,) = (line for line in lines if line["event"] == "reply" and line["kind"] == "train")
    assert line["distance"] == pytest.approx(np.linalg.norm(np.concatenate(difference)), rel=1e-5)


def test_nothing_leaves_if_the_line_cannot_be_written(site):
    site.decide()
    site.log.mkdir()
    for kind in ("query", "train", "evaluate"):
        assert "nothing leaves this site, because its audit log" in site.refusal(kind)
    assert not (site.folder / "state").exists()  # no training took place


def test_a_line_is_on_the_disk_before_its_reply_leaves(site, monkeypatch):
    on_disk, fsync = {}, os.fsync

    def noting(descriptor):
        fsync(descriptor)
        file = Path(f"/proc/self/fd/{descriptor}").resolve()
        on_disk[file] = file.read_bytes()

    monkeypatch.setattr(os, "fsync", noting)
    for kind in ("query", "train", "evaluate"):
        site.ask(kind)
        assert site.lines("reply")[-1]["kind"] == kind
        assert on_disk[site.log.resolve()] == site.log.read_bytes()

    def failing(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    before = site.log.read_bytes()
    assert f"log can't be written: Input/output error ({site.log})" in site.refusal("query")
    assert site.log.read_bytes() == before


def test_a_full_disk_leaves_no_half_line(tmp_path):
    log = AuditLog(tmp_path / "audit.jsonl")
    log.append({"event": "first"})
    size = log.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(AuditError, match="nothing leaves"):
            log.append({"event": "second"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert log.path.stat().st_size == size
    log.append({"event": "third"})
    assert [json.loads(line)["event"] for line in log.path.open()] == ["first", "third"]


def test_half_a_line_that_a_power_failure_left_spoils_no_other(tmp_path):
    log, seen = AuditLog(tmp_path / "audit.jsonl"), []
    log.append({"event": "first"})
    with log.path.open("a") as file:
        file.write('{"event": "ha')
    log.append({"event": "second"})
    log.append({"event": "third"}, check=lambda lines: seen.extend(x["event"] for x in lines))
    assert seen == ["first", "second"]


def _write(path: Path, name: str) -> None:
    for number in range(20):
        AuditLog(path).append({"event": f"{name} {number}", "text": name * 5000})


def test_processes_share_a_log(tmp_path):
    path = tmp_path / "audit.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    events = [json.loads(line)["event"] for line in path.open()]
    assert sorted(events) == sorted(f"{name} {number}" for name in "ab" for number in range(20))


def test_hidden_states_have_lines_too(values, client_folders, deep_checkpoint, tmp_path):
    nodes = {}
    for number, name in enumerate(("alpha", "beta"), start=1):
        folders = json.dumps([str(deep_checkpoint), str(tmp_path)])
        (tmp_path / f"{name}.toml").write_text(
            f'audit-log = "{tmp_path / name}.jsonl"\npaths = {folders}\n'
            'coordinators = ["127.0.0.1"]\n[split]\nallowed = true\n'
        )
        nodes[number] = {
            "name": name,
            "data-path": str(client_folders / name),
            "policy": str(tmp_path / f"{name}.toml"),
        }
    own = values | {"strategy": "fl-glm", "model.name": str(deep_checkpoint), "rounds": 1}
    own |= {"min-nodes": 2, "state-path": str(tmp_path / "state"), "train.local-steps": 2}
    del own["data.path"]
    journal = run_in_process(own, tmp_path / "state", 2, InProcessGrid(own, nodes))
    lanes = [event for event in journal.events if event["event"] == "lane"]
    for name in ("alpha", "beta"):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        closed = [line for line in lines if line["event"] == "lane-closed"]
        assert [line["kind"] for line in closed] == ["evaluate", "train", "evaluate"]
        counted = [lane["bytes_up"] for lane in lanes if lane["client"] == name]
        assert [line["bytes-up"] for line in closed] == counted
        order = [line["event"] for line in lines if line["kind"] == "train"]
        assert order == ["accepted", "lane", "lane-closed", "reply"]


def test_a_site_without_evaluation_trains(values, client_folders, tmp_path):
    own = values | {"state-path": str(tmp_path / "state"), "rounds": 2}
    policy = tmp_path / "policy.toml"
    folders = json.dumps([own["model.name"], own["data.path"], own["state-path"]])
    policy.write_text(
        f'audit-log = "{tmp_path / "audit.jsonl"}"\npaths = {folders}\nevaluation = false\n'
    )
    nodes = NODES | {2: NODES[2] | {"policy": str(policy)}}
    grid, journal = SpyingGrid(own, nodes=nodes), MemoryJournal()
    start(own, grid, journal)
    rounds = [event["participants"] for event in journal.events if event["event"] == "round"]
    assert rounds == [["alpha", "beta", "gamma"]] * 2
    assert {e["client"] for e in journal.events if e["event"] == "evaluate"} == {"alpha", "gamma"}
    missing = [event for event in journal.events if event["event"] == "evaluation-missing"]
    reason = "the site's policy refuses evaluation (evaluation = false)"
    assert [event["round"] for event in missing] == [0, 1, 2]
    assert all(e["left_out"] == [{"client": "beta", "reason": reason}] for e in missing)
    assert not [e for e in journal.events if e["event"] == "train" and "withheld" in e]
    replies = [r for r in grid.received if r.metadata.src_node_id == 2]
    evaluated = [r.content for r in replies if r.metadata.message_type == "evaluate"]
    assert [set(content[METRICS]) for content in evaluated] == [{"num-rows"}] * 3
    assert ARRAYS in evaluated[1]  # J after round 1, on training rows
    # The site still stores its adapters.
    assert list((tmp_path / "state").glob("*/beta/adapters/global/adapter_model.safetensors"))
