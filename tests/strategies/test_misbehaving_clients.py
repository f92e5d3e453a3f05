"""Clients whose replies are invalid, late or missing are named and left out; others continue."""

import io
import math
import re

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.common.constant import ErrorCode

from federation.messages import ARRAYS, METRICS, SIZE, TRAIN_EXAMPLES
from strategies import participants
from strategies.participants import RefusedError, TooFewClientsError
from tests.in_process import MemoryJournal
from tests.strategies.grids import SpyingGrid, start


def spoil(name: str, how):
    """Change the train replies of one client."""

    def change(reply):
        config = reply.content.config_records["config"]
        if reply.metadata.message_type == "train" and config["name"] == name:
            return how(reply)
        return reply

    return change


def put(value: np.ndarray):
    def how(reply):
        arrays = reply.content[ARRAYS]
        arrays[next(iter(arrays))] = Array(value)
        return reply

    return how


def rename(reply):
    arrays = dict(reply.content[ARRAYS])
    arrays["other"] = arrays.pop(next(iter(arrays)))
    reply.content[ARRAYS] = ArrayRecord(arrays)
    return reply


def without_arrays(reply):
    del reply.content[ARRAYS]
    return reply


def lie(reply):
    """Announce the correct shape and send a different number of bytes."""
    arrays = reply.content[ARRAYS]
    array = arrays[next(iter(arrays))]
    array.data = array.data[: len(array.data) // 2]
    return reply


def archive(reply):
    """Send an archive of arrays, which NumPy can read too, instead of an array."""
    arrays = reply.content[ARRAYS]
    array = arrays[next(iter(arrays))]
    file = io.BytesIO()
    np.savez(file, array.numpy())
    array.data = file.getvalue()
    return reply


def with_config(key, value):
    def how(reply):
        reply.content["config"][key] = value
        return reply

    return how


def with_metric(key, value):
    def how(reply):
        reply.content[METRICS][key] = value
        return reply

    return how


def with_metrics(count):
    def how(reply):
        reply.content[METRICS].update({f"metric-{i}": 1.0 for i in range(count)})
        return reply

    return how


def with_more(key, record):
    def how(reply):
        reply.content[key] = record
        return reply

    return how


def transpose(reply):
    """Send an array in Fortran's order, which must be accepted."""
    arrays = reply.content[ARRAYS]
    name = next(iter(arrays))
    arrays[name] = Array(np.asfortranarray(arrays[name].numpy()))
    return reply


INVALID = {
    "NaN": (put(np.full((4, 32), np.nan, np.float32)), "finite"),
    "infinity": (put(np.full((4, 32), np.inf, np.float32)), "finite"),
    "shape": (put(np.zeros((5, 32), np.float32)), r"float32\[5, 32\]"),
    "dtype": (put(np.zeros((4, 32), np.float64)), "float64"),
    "keys": (rename, "not the adapter's"),
    "nothing": (without_arrays, "no arrays"),
    "bytes": (lie, "can't be read"),
    "archive": (archive, "does not match its header"),
    "large": (put(np.full((4, 32), 3e38, np.float32)), "beyond 2³⁰"),
    "fingerprint": (with_config("base", "0" * 64), "base model"),
    "name": (with_config("name", "mallory"), "mallory"),
    "long name": (with_config("name", "mallory" * 10**5), "its name is now 'mallory"),
    "problem": (
        with_config("problem", "\x1b[2J\nround 1\u202e\ud800" * 10**5),
        r"\\x1b\[2J round",
    ),
    "size": (with_metric(SIZE, 0), SIZE),
    "another size": (with_metric(SIZE, 10**9), "was 12 when it joined"),
    "loss": (with_metric("loss", float("nan")), "loss"),
    "large loss": (with_metric("loss", -1e308), "up to ±1e\\+30"),
    "large count": (with_metric("steps", 10**400), "up to"),
    "metric's name": (with_metric("a/b\n" * 10**5, 1.0), "at most 64 letters"),
    "many metrics": (with_metrics(10**5), "at most 100"),
    "text for a number": (with_metric("loss", [1.0, 2.0]), "loss"),
    "more arrays": (with_more("more", ArrayRecord()), "more than was requested"),
    "more metrics": (with_more("a", MetricRecord({SIZE: 10**9})), "more than was requested"),
    "text": (with_more("answers", ConfigRecord()), "answers that were not requested"),
    "silence": (lambda reply: None, "no reply within"),
}


@pytest.mark.parametrize("kind", INVALID)
def test_an_invalid_reply_is_left_out_by_name(values, tmp_path, kind):
    """Each kind occurs in a round; a NaN and a missing reply also occur in the next one."""
    how, reason = INVALID[kind]
    count = 2 if kind in {"NaN", "silence"} else 1
    own = values | {"state-path": str(tmp_path), "rounds": count, "min-nodes": 2}
    own |= {"strategy": "fedjudge-base", "train.local-steps": 1}
    journal = MemoryJournal()
    start(own, SpyingGrid(own, spoil("beta", how)), journal)
    rounds = [e for e in journal.events if e["event"] == "round"]
    assert [e["participants"] for e in rounds] == [["alpha", "gamma"]] * count
    for event in rounds:
        (left_out,) = event["left_out"]
        assert left_out["client"] == "beta"
        assert re.search(reason, left_out["reason"])
        assert left_out["reason"].isprintable() and len(left_out["reason"]) <= 1000
    assert all(torch.isfinite(v).all() for v in journal.adapters[count].values())
    assert set(journal.kept) == {"alpha", "gamma"}


def at_limits(reply):
    """Change a reply so that all of its parts have the maximum size."""
    metrics = reply.content[METRICS]
    metrics.update({"loss": 1e30, "loss-first": -1e30, "a" * 64: 1.0})
    metrics.update({f"filling-{i}": 1.0 for i in range(100 - len(metrics))})
    return put(with_one(2.0**30))(reply)


def with_one(value):
    weights = np.zeros((4, 32), np.float32)
    weights[0, 0] = value
    return weights


def lengthen(reply):
    metrics = reply.content[METRICS]
    metrics["a" * 65] = metrics.pop("a" * 64)
    return reply


BEYOND = {
    "nothing": (lambda reply: reply, None),
    "metrics": (with_metrics(1), "it sent 101 metrics"),
    "metric's name": (lengthen, "at most 64 letters"),
    "loss": (
        with_metric("loss", math.nextafter(1e30, math.inf)),
        "these are not: loss",
    ),
    "-loss": (
        with_metric("loss-first", math.nextafter(-1e30, -math.inf)),
        "these are not: loss",
    ),
    "weight": (put(with_one(2.0**30 + 128)), "beyond 2³⁰"),  # the next float32 value
    "-weight": (put(with_one(-(2.0**30) - 128)), "beyond 2³⁰"),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_a_reply_may_be_at_every_limit_and_not_beyond_one(values, tmp_path, kind):
    how, reason = BEYOND[kind]
    own = values | {"strategy": "fedjudge-base", "rounds": 1, "min-nodes": 2}
    own |= {"state-path": str(tmp_path), "train.local-steps": 1}
    journal = MemoryJournal()
    start(own, SpyingGrid(own, spoil("beta", lambda reply: how(at_limits(reply)))), journal)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert ("beta" in event["participants"]) == (reason is None)
    for left_out in event["left_out"]:
        assert left_out["client"] == "beta" and reason in left_out["reason"]


def test_an_array_in_another_order_is_as_good_as_any_other(values, tmp_path):
    averages = []
    for how in (lambda reply: reply, transpose):
        own = values | {"state-path": str(tmp_path / str(len(averages))), "rounds": 1}
        own |= {"train.local-steps": 1}
        journal = MemoryJournal()
        start(own, SpyingGrid(own, spoil("beta", how)), journal)
        averages.append(journal.adapters[1])
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


def test_only_importance_that_pushes_away_is_refused(values, tmp_path):
    def change(reply):
        arrays = reply.content.array_records.get(ARRAYS)
        name = reply.content["config"]["name"]
        if reply.metadata.message_type == "evaluate" and arrays and name in {"alpha", "beta"}:
            first = next(iter(arrays))
            value = arrays[first].numpy()
            arrays[first] = Array(-value - 1 if name == "beta" else np.zeros_like(value))
        return reply

    own = values | {"state-path": str(tmp_path), "rounds": 2, "train.local-steps": 1}
    grid, journal = SpyingGrid(own, change), MemoryJournal()
    start(own, grid, journal)
    (event,) = (e for e in journal.events if e["event"] == "evaluation-missing")
    (left_out,) = event["left_out"]
    assert left_out["client"] == "beta" and "below 0" in left_out["reason"]
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert all(a.numpy().min() >= 0 for a in trained[-1].content["importance"].values())


def test_a_client_that_vanishes_is_named(values, tmp_path):
    class Vanishing(SpyingGrid):
        def get_node_ids(self):
            gone = any(m.metadata.message_type == "train" for m in self.sent)
            return [1, 3] if gone else [1, 2, 3]

    own = values | {"state-path": str(tmp_path), "rounds": 2, "min-nodes": 2}
    own |= {"train.local-steps": 1}
    journal = MemoryJournal()
    start(own, Vanishing(own), journal)
    rounds = [e for e in journal.events if e["event"] == "round"]
    assert [e["participants"] for e in rounds] == [["alpha", "beta", "gamma"], ["alpha", "gamma"]]
    assert rounds[1]["left_out"] == [{"client": "beta", "reason": "its SuperNode is not connected"}]


def test_those_left_out_are_named_in_the_order_of_names(values, tmp_path):
    """An invalid answer is noticed before a missing one."""
    silent, wrong = INVALID["silence"][0], INVALID["NaN"][0]
    own = values | {"strategy": "fedjudge-base", "rounds": 1, "min-nodes": 1}
    own |= {"state-path": str(tmp_path), "train.local-steps": 1}

    def change(reply):
        return spoil("alpha", silent)(spoil("gamma", wrong)(reply))

    journal = MemoryJournal()
    start(own, SpyingGrid(own, change), journal)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert [left_out["client"] for left_out in event["left_out"]] == ["alpha", "gamma"]


@pytest.mark.parametrize(
    ("code", "said", "reason"),
    [
        (ErrorCode.NODE_UNAVAILABLE, "no heartbeat", "its SuperNode is no longer connected"),
        (
            ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            "<class 'ray.exceptions.OutOfMemoryError'>:<'1 worker(s) were killed",
            "its process was ended, because the machine ran out of memory: lower train.batch-size "
            "or data.max-length, or simulate fewer clients",
        ),
    ],
)
def test_a_client_that_is_lost_is_named_with_the_reason(values, tmp_path, code, said, reason):
    """The SuperLink answers in place of a SuperNode that sends no heartbeats."""

    def lose(reply):
        asked = Message(RecordDict(), 10**9, reply.metadata.message_type)
        asked.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
        return Message(Error(code, said), reply_to=asked)

    own = values | {"state-path": str(tmp_path), "rounds": 1, "min-nodes": 2}
    own |= {"train.local-steps": 1}
    journal = MemoryJournal()
    start(own, SpyingGrid(own, spoil("beta", lose)), journal)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert event["participants"] == ["alpha", "gamma"]
    assert event["left_out"] == [{"client": "beta", "reason": reason}]


@pytest.mark.nightly
def test_newcomers_are_asked_first_and_silent_ones_thrice(values, tmp_path):
    class Growing(SpyingGrid):
        def get_node_ids(self):
            trained = any(m.metadata.message_type == "train" for m in self.sent)
            return [1, 2, 3] if trained else [1, 2]

    own = values | {"state-path": str(tmp_path), "min-nodes": 2}
    journal = MemoryJournal()
    start(own, Growing(own), journal)
    rounds = [e["participants"] for e in journal.events if e["event"] == "round"]
    assert rounds == [["alpha", "beta"], ["alpha", "beta", "gamma"], ["alpha", "beta", "gamma"]]

    def silent(reply):
        third = reply.metadata.src_node_id == 3
        return None if third and reply.metadata.message_type == "query" else reply

    own |= {"state-path": str(tmp_path / "silent"), "node-timeout": 1e-3, "rounds": 5}
    grid = Growing(own, silent)
    start(own, grid, MemoryJournal())
    asked = [m for m in grid.sent if m.metadata.message_type == "query"]
    assert [m.metadata.dst_node_id for m in asked] == [1, 2, 3, 3, 3]


def test_refused_supernodes_do_not_count(values, tmp_path, monkeypatch):
    """A run waits for a SuperNode that restarts while one that was refused stays connected."""
    monkeypatch.setattr(participants, "_POLL_SECONDS", 0.01)

    class Restarting(SpyingGrid):
        polls = 0  # since the first round

        def get_node_ids(self):
            self.polls += any(m.metadata.message_type == "train" for m in self.sent)
            absent = {2} if 5 < self.polls < 20 else set()
            return sorted({1, 2, 3} - absent) if self.polls else [1, 2]

    def change(reply):
        if reply.metadata.src_node_id == 3:
            reply.content["config"]["problem"] = "disk on fire"
        return reply

    own = values | {"state-path": str(tmp_path), "min-nodes": 2, "train.local-steps": 1}
    grid, journal = Restarting(own, change), MemoryJournal()
    start(own, grid, journal)
    rounds = [e["participants"] for e in journal.events if e["event"] == "round"]
    assert rounds == [["alpha", "beta"]] * 3 and grid.polls > 20


def test_too_few_valid_replies_end_the_run(values, tmp_path):
    own = values | {"state-path": str(tmp_path), "train.local-steps": 1}
    grid = SpyingGrid(own, spoil("beta", INVALID["NaN"][0]))
    with pytest.raises(TooFewClientsError, match=r"2 valid replies.*min-nodes = 3[\s\S]*beta: "):
        start(own, grid, MemoryJournal())


def test_too_few_nodes_within_the_wait(values, tmp_path):
    own = values | {"state-path": str(tmp_path), "min-nodes": 4, "node-timeout": 0.2}
    with pytest.raises(TooFewClientsError, match="num-supernodes=4"):
        start(own, SpyingGrid(own), MemoryJournal())


def test_a_client_over_its_time_says_so(values, tmp_path):
    own = values | {"state-path": str(tmp_path), "round-timeout": 1e-6}
    with pytest.raises(TooFewClientsError, match="round-timeout"):
        start(own, SpyingGrid(own), MemoryJournal())


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("name", "alpha", "another SuperNode is already named 'alpha'"),
        ("name", "../alpha", "must be at most 64 letters"),
        ("name", "", "must be at most 64 letters"),
        ("name", "ALPHA", r"another SuperNode is already named 'alpha' \(names are case"),
        pytest.param("name", "𐐀" * 63, "at most 200 bytes", id="252 bytes"),  # no folder's name
        ("name", "\x1b[2J\n" * 10**5, r"x1b\[2J\\n.*….* must be at most 64 letters"),
        ("digests", None, "its base model is not the run's: .* differ"),
        ("tensors", "text", "report its base model"),
        ("tensors", [b"bytes"], "report its base model"),
        ("digests", [], "report its base model"),
        ("problem", "disk on fire", "disk on fire"),
    ],
)
def test_nobody_trains_while_someone_can_not(values, tmp_path, key, value, reason):
    def change(reply):
        config = reply.content["config"]
        if reply.metadata.message_type == "query" and config["name"] == "beta":
            config[key] = [d[::-1] for d in config["digests"]] if value is None else value
        return reply

    own = values | {"state-path": str(tmp_path)}
    grid = SpyingGrid(own, change)
    with pytest.raises(RefusedError, match=reason):
        start(own, grid, MemoryJournal())
    assert {m.metadata.message_type for m in grid.sent} == {"query"}


@pytest.mark.parametrize(
    ("key", "last", "beyond"),
    [
        (SIZE, 1, 0),
        (SIZE, 10**9, 10**9 + 1),
        (TRAIN_EXAMPLES, 1, 0),
        (TRAIN_EXAMPLES, 10**9, 10**9 + 1),
        pytest.param("name", "b" * 64, "b" * 65, id="name-64 letters"),
        pytest.param("name", "𐐀" * 50, "𐐀" * 50 + "b", id="name-200 bytes"),
    ],
)
def test_names_and_sizes_may_be_at_their_limits(values, tmp_path, key, last, beyond):
    def answering(value):
        def change(reply):
            config, metrics = reply.content["config"], reply.content[METRICS]
            if config["name"] == "beta":
                (config if key == "name" else metrics)[key] = value
            return reply

        return change

    own = values | {"strategy": "fedjudge-base", "rounds": 1, "state-path": str(tmp_path)}
    own |= {"train.local-steps": 1}
    with pytest.raises(RefusedError, match="must be"):
        start(own, SpyingGrid(own, answering(beyond)), MemoryJournal())
    journal = MemoryJournal()
    start(own, SpyingGrid(own, answering(last)), journal)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert len(event["participants"]) == 3


def test_malformed_rows_are_refused_by_file_and_line(values, tmp_path):
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.jsonl").write_text(
            '{"instruction": "a", "output": "b"}\n' * 4
        )
    bad = tmp_path / "data" / "beta" / "train.jsonl"
    bad.write_text(bad.read_text() + '{"instruction": "a"}\n')
    own = values | {"state-path": str(tmp_path), "data.path": str(tmp_path / "data")}
    with pytest.raises(RefusedError, match=r"beta/train\.jsonl:5: has no answer"):
        start(own, SpyingGrid(own), MemoryJournal())
    journal = MemoryJournal()
    own |= {"data.skip-bad-rows": True, "rounds": 1}
    start(own, SpyingGrid(own), journal)
    assert 1 in journal.adapters
