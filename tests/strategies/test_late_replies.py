"""A reply that arrives after its round, but before the next one, is averaged as if in time."""

import shutil
from concurrent.futures import Future, wait

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Array

from chambers.in_process import InProcessGrid
from federation.authentication import Signer
from federation.messages import ARRAYS
from federation.run_config import ConfigError, parse_run_config
from strategies import exchange
from tests.in_process import MemoryJournal
from tests.server_app.runs import PowerFailureError, events, final, run
from tests.strategies.grids import NODES, same, start


class Late(InProcessGrid):
    """Returns beta's reply of round 2 during the evaluation after the round."""

    def __init__(self, values, nodes=NODES, late=True, change=lambda replies: None):
        super().__init__(values, nodes)
        self.pushed: list[str] = []
        self.ttls: set[tuple[str, float]] = set()
        self.late, self.held, self.change = late, [], change

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        kind = messages[0].metadata.message_type
        self.pushed.append(kind)
        self.ttls |= {(kind, message.metadata.ttl) for message in messages}
        replies = list(super().send_and_receive(messages))
        if kind == "train" and self.pushed.count("train") == 2:
            self.held = [reply for reply in replies if reply.metadata.src_node_id == 2]
            self.change(self.held)
            return [r for r in replies if r not in self.held] if self.late else replies
        if kind == "evaluate" and self.late:
            replies, self.held = replies + self.held, []
        return replies


def poison(replies):
    for reply in replies:
        arrays = reply.content.array_records[ARRAYS]
        for name, array in list(arrays.items()):
            arrays[name] = Array(np.full_like(array.numpy(), 1e3))


@pytest.fixture
def settings(values, tmp_path):
    values |= {"min-nodes": 2, "rounds": 3, "train.local-steps": 2, "late-replies": True}
    return values | {"state-path": str(tmp_path / "state")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "every", "change"),
    [
        ("fedjudge-cl", 1, lambda replies: None),
        ("fedjudge-base", 1, poison),
        ("fedjudge-base", 3, lambda replies: None),
    ],
    ids=["J", "scaled", "no evaluation"],
)
def test_the_average_is_as_if_the_reply_had_been_in_time(settings, strategy, every, change):
    settings |= {"strategy": strategy, "evaluate.every": every}
    journals = []
    for late in (False, True):
        journals.append(MemoryJournal())
        grid = Late(settings, late=late, change=change)
        start(settings, grid, journals[-1])
        # The SuperLink refuses replies to messages that have expired.
        assert {("train", 7320.0), ("evaluate", 3660.0)} <= grid.ttls
    in_time, late = journals
    expected = every == 1  # else, no evaluation follows in which the reply could arrive
    assert same(late.adapters[2], in_time.adapters[2]) is expected
    assert same(late.adapters[3], in_time.adapters[3]) is expected
    (round_2,) = (e for e in late.events if (e["event"], e["round"]) == ("round", 2))
    assert round_2["participants"] == ["alpha", "gamma"]
    found = [e for e in late.events if e["event"] == "late"]
    about = {"event": "late", "round": 2, "clients": ["beta"]}
    assert found == [about | {"participants": ["alpha", "beta", "gamma"]}] * expected
    if expected:
        # The evaluation, and any J, belong to the repeated average.
        assert evaluated(late)[-3:] == evaluated(in_time)[-3:]
        assert evaluated(late, 2)[-6:] == evaluated(in_time, 2)
        scaled = [[e for e in j.events if e["event"] == "scaled"] for j in journals]
        assert scaled[0] == scaled[1] and bool(scaled[0]) is (change is poison)
        assert all(same(late.kept[name], in_time.kept[name]) for name in late.kept)


def evaluated(journal, number=3):
    found = (e for e in journal.events if e["event"] == "evaluate" and e["round"] == number)
    return [(e["client"], e["model"], e["loss"]) for e in found]


@pytest.mark.slow
@pytest.mark.parametrize("forged", [False, True])
def test_a_late_reply_must_be_authentic(settings, caplog, forged):
    def forge(replies):
        for reply in replies if forged else ():
            reply.content["authenticated-reply"]["mac"] = bytes(32)

    settings |= {"strategy": "fedjudge-base"}
    signer = Signer(Ed25519PrivateKey.generate(), parse_run_config(settings))
    journal = MemoryJournal()
    start(settings, Late(settings, change=forge), journal, signer=signer)
    assert [e["clients"] for e in journal.events if e["event"] == "late"] == [["beta"]] * (
        not forged
    )
    assert ("beta is left out: its reply is refused" in caplog.text) is forged


def test_a_late_reply_that_takes_long_to_pull_is_averaged(settings, monkeypatch):
    """As from a SuperLink that receives the rest of it only while the server waits."""
    begin_pull, slow = exchange._begin_pull, {}
    settings |= {"strategy": "fedjudge-base", "rounds": 2, "train.local-steps": 1}
    grid, journal = Late(settings), MemoryJournal()

    def begun(_, identifier, request):
        pull = begin_pull(grid, identifier, request)
        if grid.pushed[-1] != "evaluate" or request.metadata.message_type != "train":
            return pull
        unfinished = Future()
        slow[unfinished] = pull.result()
        return unfinished

    def waiting(pulls, patience):
        for pull in slow.keys() & {*pulls} if patience > 5.0 else ():
            pull.set_result(slow.pop(pull))
        return wait(pulls, patience)

    monkeypatch.setattr(exchange, "_begin_pull", begun)
    monkeypatch.setattr(exchange, "wait", waiting)
    start(settings, grid, journal)
    assert [e["clients"] for e in journal.events if e["event"] == "late"] == [["beta"]]


@pytest.mark.slow
def test_a_resumed_run_has_the_late_reply_if_its_checkpoint_has(settings, tmp_path):
    class Stopping(Late):
        """Stops the machine when the repeated average is to be evaluated."""

        def send_and_receive(self, messages, *, timeout=None):
            if self.pushed[-2:] == ["train", "evaluate"] and self.pushed.count("train") == 2:
                raise PowerFailureError
            return super().send_and_receive(messages)

    settings |= {"strategy": "fedjudge-cl"}
    here = {"output-dir": str(tmp_path / "a"), "state-path": str(tmp_path / "a-state")}
    there = {"output-dir": str(tmp_path / "b"), "state-path": str(tmp_path / "b-state")}
    unbroken = run(settings | here, kind=Late)
    broken = run(settings | there, kind=Stopping)
    run(settings | there | {"resume": str(broken)})
    one, other = final(unbroken), final(broken)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert events(unbroken) == events(broken)


@pytest.mark.slow
def test_a_late_reply_that_no_checkpoint_has_is_forgotten(settings, tmp_path):
    settings |= {"strategy": "fedjudge-base", "rounds": 2}
    settings |= {"output-dir": str(tmp_path / "runs")}
    directory = run(settings, stop_after=(2, False), kind=Late)
    trained = directory / ".trained" / "2"
    assert sorted(folder.name for folder in trained.iterdir()) == ["alpha", "gamma"]
    shutil.copytree(trained / "alpha", trained / "beta")  # as a process killed too early would
    run(settings | {"resume": str(directory)})
    one, other = (
        (directory / "adapters" / "clients" / name / "adapter_model.safetensors").read_bytes()
        for name in ("alpha", "beta")
    )
    assert one != other


def test_split_learning_refuses_late_replies(settings):
    with pytest.raises(ConfigError, match='late-replies = True is not for strategy = "fl-glm"'):
        parse_run_config(settings | {"strategy": "fl-glm"})
