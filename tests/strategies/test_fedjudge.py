"""FedJudge as clients and server play it together: averages, penalty, silence, order."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, MetricRecord

from bench.in_process import InProcessGrid, MemoryJournal, run_in_process
from finetuning.adapters import initial_adapter
from finetuning.base_model import locate
from finetuning.fingerprint import fingerprint
from finetuning.randomness import derive_seed
from strategies.fedjudge import FedJudgeBase, FedJudgeCL
from strategies.messages import ARRAYS, METRICS, SIZE, to_arrays
from strategies.roster import RefusedError, TooFewClientsError
from strategies.rounds import Progress
from strategies.run_config import parse_run_config

SIZES = {"alpha": 24, "beta": 12, "gamma": 8}
NODES = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}


def start(values: dict, grid, journal: MemoryJournal):
    config = parse_run_config(values)
    state, _ = initial_adapter(
        config.model.name, config.adapter, derive_seed("adapter", config.seed)
    )
    kind = FedJudgeCL if config.strategy == "fedjudge-cl" else FedJudgeBase
    strategy = kind(config, fingerprint(locate(config.model.name)), Progress("test"), journal)
    strategy.start(grid, to_arrays(state), config.rounds)
    return strategy


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class SpyingGrid(InProcessGrid):
    """Keeps what crosses it, and lets a test change or drop replies on the way."""

    def __init__(self, values, change=lambda reply: reply):
        super().__init__(values, NODES)
        self.sent, self.received, self.change = [], [], change

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.sent += messages
        replies = [self.change(reply) for reply in super().send_and_receive(messages)]
        self.received += replies
        return [reply for reply in replies if reply is not None]


def test_the_global_adapter_is_the_weighted_mean_of_the_local_ones(values, tmp_path):
    grid, journal = SpyingGrid(values | {"state-path": str(tmp_path)}), MemoryJournal()
    start(values | {"state-path": str(tmp_path), "rounds": 1}, grid, journal)
    replies = [r for r in grid.received if r.metadata.message_type == "train"]
    assert len(replies) == 3
    total = sum(SIZES.values())
    for name, averaged in journal.adapters[1].items():
        dense = sum(
            r.content[ARRAYS][name].numpy().astype(np.float64) * r.content[METRICS][SIZE] / total
            for r in replies
        )
        np.testing.assert_allclose(averaged.numpy(), dense, atol=1e-6)
        assert np.abs(dense).max() > 0 or "lora_B" in name


def test_sizes_are_the_rows_of_each_client(values, tmp_path):
    journal = run_in_process(values | {"rounds": 1}, tmp_path, 3)
    trained = {e["client"]: e["examples"] for e in journal.events if e["event"] == "train"}
    assert trained == SIZES


def test_penalty_is_absent_in_round_1_and_pulls_from_round_2_on(values, tmp_path):
    journal = run_in_process(values | {"continual.lambda": 1.0}, tmp_path, 3)
    for event in (e for e in journal.events if e["event"] == "train"):
        if event["round"] == 1:
            assert "penalty" not in event
        else:
            assert event["penalty"] > 0
            assert 0 < event["penalty_gradient_share"] < 1


@pytest.mark.parametrize("importance", ["server", "client"])
def test_lambda_zero_is_fedjudge_base_bit_for_bit(values, tmp_path, importance):
    base = run_in_process(values | {"strategy": "fedjudge-base"}, tmp_path / "base", 3)
    zero = {"continual.lambda": 0.0, "continual.importance": importance}
    journal = run_in_process(values | zero, tmp_path / "zero", 3)
    assert all(same(base.adapters[r], journal.adapters[r]) for r in (1, 2, 3))
    assert all(same(base.kept[c], journal.kept[c]) for c in SIZES)
    distances = [
        e["importance_distance"]
        for e in journal.events
        if e.get("round", 0) > 1 and e["event"] == "train"
    ]
    assert len(distances) == 6 and min(distances) > 0


@pytest.mark.parametrize("jacobian", ["mean-absolute", "mean-gradient"])
@pytest.mark.parametrize("importance", ["server", "client"])
def test_a_larger_lambda_keeps_local_adapters_nearer(values, tmp_path, importance, jacobian):
    def distance(weight: float) -> float:
        kind = {"continual.importance": importance, "continual.jacobian": jacobian}
        journal = run_in_process(
            values | kind | {"rounds": 2, "continual.lambda": weight}, tmp_path / str(weight), 3
        )
        events = [e for e in journal.events if e["event"] == "train" and e["round"] == 2]
        return sum(e["importance_distance"] for e in events)

    assert distance(100.0) < distance(0.0)


def test_importance_is_averaged_by_data_size_and_sent_with_the_next_round(values, tmp_path):
    grid, journal = SpyingGrid(values | {"state-path": str(tmp_path)}), MemoryJournal()
    start(values | {"state-path": str(tmp_path), "rounds": 2}, grid, journal)
    own = [
        r
        for r in grid.received
        if r.metadata.message_type == "evaluate" and ARRAYS in r.content.array_records
    ]
    assert len(own) == 3
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert all("importance" not in m.content.array_records for m in trained[:3])
    total = sum(SIZES.values())
    for message in trained[3:]:
        for name, array in message.content["importance"].items():
            dense = sum(
                r.content[ARRAYS][name].numpy() * r.content[METRICS][SIZE] / total for r in own
            )
            np.testing.assert_allclose(array.numpy(), dense, rtol=1e-5)
            assert dense.min() >= 0


def test_clients_share_no_storage(values, tmp_path):
    journal = run_in_process(values | {"rounds": 2}, tmp_path, 3)
    states = [*journal.kept.values(), *journal.adapters.values()]
    before = [{k: v.clone() for k, v in state.items()} for state in states]
    for index, state in enumerate(states):
        for tensor in state.values():
            tensor.add_(1.0)
        for other in range(index + 1, len(states)):
            assert same(states[other], before[other])


def test_result_does_not_depend_on_who_answers_first(values, tmp_path):
    class Reversed(SpyingGrid):
        def send_and_receive(self, messages, *, timeout=None):
            return list(super().send_and_receive(messages))[::-1]

    journals = []
    for number, kind in enumerate((SpyingGrid, Reversed)):
        journal = MemoryJournal()
        own = values | {"state-path": str(tmp_path / str(number)), "rounds": 2}
        start(own, kind(own), journal)
        journals.append(journal)
    assert same(journals[0].adapters[2], journals[1].adapters[2])


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
    """Announce the right shape and send other bytes."""
    arrays = reply.content[ARRAYS]
    array = arrays[next(iter(arrays))]
    array.data = array.data[: len(array.data) // 2]
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


def with_more(key, record):
    def how(reply):
        reply.content[key] = record
        return reply

    return how


ODD = {
    "NaN": (put(np.full((4, 32), np.nan, np.float32)), "finite"),
    "infinity": (put(np.full((4, 32), np.inf, np.float32)), "finite"),
    "shape": (put(np.zeros((5, 32), np.float32)), r"float32\[5, 32\]"),
    "dtype": (put(np.zeros((4, 32), np.float64)), "float64"),
    "keys": (rename, "not the adapter's"),
    "nothing": (without_arrays, "no arrays"),
    "bytes": (lie, "can't be read"),
    "fingerprint": (with_config("base", "0" * 64), "base model"),
    "name": (with_config("name", "mallory"), "mallory"),
    "size": (with_metric(SIZE, 0), SIZE),
    "loss": (with_metric("loss", float("nan")), "loss"),
    "text for a number": (with_metric("loss", [1.0, 2.0]), "loss"),
    "more arrays": (with_more("more", ArrayRecord()), "more than was asked for"),
    "more metrics": (with_more("a", MetricRecord({SIZE: 10**9})), "more than was asked for"),
    "silence": (lambda reply: None, "no reply within"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_reply_is_left_out_by_name_and_the_others_count(values, tmp_path, kind):
    how, reason = ODD[kind]
    own = values | {"state-path": str(tmp_path), "rounds": 2, "min-nodes": 2}
    journal = MemoryJournal()
    start(own, SpyingGrid(own, spoil("beta", how)), journal)
    rounds = [e for e in journal.events if e["event"] == "round"]
    assert [e["participants"] for e in rounds] == [["alpha", "gamma"]] * 2
    for event in rounds:
        (left_out,) = event["left_out"]
        assert left_out["client"] == "beta"
        assert re.search(reason, left_out["reason"])
    assert all(torch.isfinite(v).all() for v in journal.adapters[2].values())
    assert set(journal.kept) == {"alpha", "gamma"}


def test_importance_that_pushes_away_is_refused(values, tmp_path):
    def change(reply):
        arrays = reply.content.array_records.get(ARRAYS)
        name = reply.content["config"]["name"]
        if reply.metadata.message_type == "evaluate" and arrays and name == "beta":
            first = next(iter(arrays))
            arrays[first] = Array(-arrays[first].numpy() - 1)
        return reply

    own = values | {"state-path": str(tmp_path), "rounds": 2}
    grid, journal = SpyingGrid(own, change), MemoryJournal()
    start(own, grid, journal)
    (event,) = (e for e in journal.events if e["event"] == "evaluation-missing")
    assert event["left_out"][0]["client"] == "beta"
    assert "below 0" in event["left_out"][0]["reason"]
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert all(a.numpy().min() >= 0 for a in trained[-1].content["importance"].values())


def test_a_client_that_vanishes_is_named(values, tmp_path):
    class Vanishing(SpyingGrid):
        def get_node_ids(self):
            gone = any(m.metadata.message_type == "train" for m in self.sent)
            return [1, 3] if gone else [1, 2, 3]

    own = values | {"state-path": str(tmp_path), "rounds": 2, "min-nodes": 2}
    journal = MemoryJournal()
    start(own, Vanishing(own), journal)
    rounds = [e for e in journal.events if e["event"] == "round"]
    assert [e["participants"] for e in rounds] == [["alpha", "beta", "gamma"], ["alpha", "gamma"]]
    assert rounds[1]["left_out"] == [{"client": "beta", "reason": "its SuperNode is not connected"}]


def test_one_who_joins_later_is_asked_first_and_a_silent_one_only_once(values, tmp_path):
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

    own["state-path"] = str(tmp_path / "silent")
    grid = Growing(own, silent)
    start(own, grid, MemoryJournal())
    asked = [m for m in grid.sent if m.metadata.message_type == "query"]
    assert [m.metadata.dst_node_id for m in asked] == [1, 2, 3]


def test_too_few_valid_replies_end_the_run_with_names_and_reasons(values, tmp_path):
    own = values | {"state-path": str(tmp_path)}
    grid = SpyingGrid(own, spoil("beta", ODD["NaN"][0]))
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
        ("name", "alpha", "another SuperNode is named 'alpha'"),
        ("name", "../alpha", "must be letters"),
        ("name", "", "must be letters"),
        ("digests", None, "its base model is not the run's: .* differ"),
        ("tensors", "text", "which base model"),
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


def test_malformed_rows_are_refused_before_training_by_file_and_line(values, tmp_path):
    for name in ("alpha", "beta", "gamma"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "train.jsonl").write_text(
            '{"instruction": "a", "output": "b"}\n' * 4
        )
    bad = tmp_path / "data" / "beta" / "train.jsonl"
    bad.write_text(bad.read_text() + '{"instruction": "a"}\n')
    own = values | {"state-path": str(tmp_path), "data.path": str(tmp_path / "data")}
    with pytest.raises(RefusedError, match=r"beta/train\.jsonl:5: has neither"):
        start(own, SpyingGrid(own), MemoryJournal())
    journal = MemoryJournal()
    own |= {"data.skip-bad-rows": True, "rounds": 1}
    start(own, SpyingGrid(own), journal)
    assert 1 in journal.adapters


def test_evaluation_only_when_due_and_at_the_end(values, tmp_path):
    journal = run_in_process(
        values | {"strategy": "fedjudge-base", "evaluate.every": 2}, tmp_path, 3
    )
    evaluated = {(e["round"], e["model"]) for e in journal.events if e["event"] == "evaluate"}
    assert evaluated == {
        (0, "base"),
        (2, "global"),
        (2, "personalised"),
        (3, "global"),
        (3, "personalised"),
    }


def test_clients_keep_the_final_adapters_and_two_rounds(values, tmp_path: Path):
    run_in_process(values, tmp_path, 3)
    for name in SIZES:
        folder = tmp_path / "bench" / name
        assert sorted(p.name for p in folder.iterdir()) == [
            *("adapters", "base-model.json", "config.json", "round-0002", "round-0003"),
        ]
        kept = json.loads((folder / "base-model.json").read_text())
        base = values["model.name"]
        assert kept == {"loaded from": base, "digests": fingerprint(Path(base))}
        for kind in ("global", "personalised"):
            assert (folder / "adapters" / kind / "adapter_config.json").is_file()
