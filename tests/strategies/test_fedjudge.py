"""FedJudge with clients and server: averages, penalty, silent clients and order."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import Array
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from client_app import fedjudge
from client_app.institution import open_institution
from federation.messages import ARRAYS, METRICS, SIZE, from_arrays
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import export_adapter, exported_names, load_adapter
from finetuning.data.batching import collate
from finetuning.evaluation.held_out import held_out_loss
from finetuning.model.fingerprint import fingerprint
from finetuning.whole_model import WholeModel
from tests.conftest import config, write_rows
from tests.in_process import MemoryJournal, run_in_process
from tests.marks import nightly
from tests.strategies.grids import NODES, SpyingGrid, same, start

SIZES = {"alpha": 24, "beta": 12, "gamma": 8}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, checkpoint, client_folders):
    """Train three rounds; return the folder of the clients' states, the grid and the journal."""
    folder = tmp_path_factory.mktemp("finished")
    own = config(checkpoint, client_folders) | {"state-path": str(folder)}
    grid, journal = SpyingGrid(own), MemoryJournal()
    start(own, grid, journal)
    return folder, grid, journal


def test_the_global_adapter_is_the_weighted_mean(finished):
    _, grid, journal = finished
    replies = [r for r in grid.received if r.metadata.message_type == "train"][:3]
    assert {r.content["config"]["name"] for r in replies} == SIZES.keys()
    total = sum(SIZES.values())
    for name, averaged in journal.adapters[1].items():
        dense = sum(
            r.content[ARRAYS][name].numpy().astype(np.float64) * r.content[METRICS][SIZE] / total
            for r in replies
        )
        np.testing.assert_allclose(averaged.numpy(), dense, atol=1e-6)
        assert np.abs(dense).max() > 0 or "lora_B" in name


def test_sizes_are_the_rows_of_each_client(finished):
    _, _, journal = finished
    trained = {e["client"]: e["examples"] for e in journal.events if e["event"] == "train"}
    assert trained == SIZES


def test_penalty_is_absent_in_round_1_and_pulls_from_round_2_on(finished):
    _, _, journal = finished
    for event in (e for e in journal.events if e["event"] == "train"):
        if event["round"] == 1:
            assert "penalty" not in event
        else:
            assert event["penalty"] > 0
            assert 0 < event["penalty_gradient_share"] < 1


@pytest.mark.parametrize("importance", ["server", nightly("client")])
def test_lambda_zero_is_fedjudge_base_bit_for_bit(values, tmp_path, importance):
    values |= {"train.local-steps": 2}
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


@pytest.mark.parametrize("importance", ["server", nightly("client")])
def test_a_larger_lambda_keeps_local_adapters_nearer(values, tmp_path, importance):
    def distance(weight: float) -> float:
        kind = {"continual.importance": importance}
        journal = run_in_process(
            values | kind | {"rounds": 2, "continual.lambda": weight}, tmp_path / str(weight), 3
        )
        events = [e for e in journal.events if e["event"] == "train" and e["round"] == 2]
        return sum(e["importance_distance"] for e in events)

    assert distance(100.0) < distance(0.0)


def test_batch_size_does_not_change_importance(values, tmp_path):
    def sent(batch_size: int) -> dict[str, torch.Tensor]:
        # The learning rate is tiny, so J is computed at nearly the same weights.
        own = values | {"train.batch-size": batch_size, "train.learning-rate": 1e-9, "rounds": 2}
        own |= {"state-path": str(tmp_path / str(batch_size))}
        grid = SpyingGrid(own)
        start(own, grid, MemoryJournal())
        last = next(m for m in reversed(grid.sent) if "importance" in m.content.array_records)
        return from_arrays(last.content["importance"])

    one, four = sent(1), sent(4)
    for name, value in one.items():
        torch.testing.assert_close(four[name], value, rtol=1e-4, atol=1e-8)
    assert any(value.any() for value in one.values())


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_round_has_the_share_asked_for(values, tmp_path, shuffle):
    wanted = {"continual.share": 0.2, "continual.shuffle": shuffle, "train.local-steps": 2}
    journal = run_in_process(values | wanted, tmp_path, 3)
    trained = [e for e in journal.events if e["event"] == "train" and e["round"] > 1]
    assert len(trained) == 6
    for event in trained:
        assert event["penalty_gradient_share"] == pytest.approx(0.2, rel=1e-3)
        assert event["lambda"] > 0


def test_importance_is_averaged_by_data_size(finished):
    _, grid, _ = finished
    own = [
        r
        for r in grid.received
        if r.metadata.message_type == "evaluate" and ARRAYS in r.content.array_records
    ]
    assert len(own) == 6  # after the first and the second round
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert all("importance" not in m.content.array_records for m in trained[:3])
    total = sum(SIZES.values())
    for number, message in enumerate(trained[3:]):
        of_round = own[:3] if number < 3 else own[3:]
        for name, array in message.content["importance"].items():
            dense = sum(
                r.content[ARRAYS][name].numpy() * r.content[METRICS][SIZE] / total for r in of_round
            )
            np.testing.assert_allclose(array.numpy(), dense, rtol=1e-5)
            assert dense.min() >= 0


def test_clients_measure_what_they_keep(values, tmp_path):
    """Here, J is computed on one row, so it is the absolute gradient of that row's loss."""
    own = values | {"rounds": 2, "continual.importance-examples": 1, "state-path": str(tmp_path)}
    own |= {"train.local-steps": 2}
    grid, journal = SpyingGrid(own), MemoryJournal()
    start(own, grid, journal)
    measured = {
        (e["client"], e["model"]): e["loss"]
        for e in journal.events
        if e["event"] == "evaluate" and e["round"] == 2
    }
    importances = {
        reply.content["config"]["name"]: from_arrays(reply.content[ARRAYS])
        for reply in grid.received
        if reply.metadata.message_type == "evaluate" and ARRAYS in reply.content.array_records
    }
    parsed, drawn = parse_run_config(own), []
    for number, client in enumerate(SIZES, start=1):
        institution = open_institution(parsed, NODES[number])
        for kind, adapter in (
            ("global", journal.adapters[2]),
            ("personalised", journal.kept[client]),
        ):
            (directory,) = tmp_path.glob(f"*/{client}/adapters/{kind}")
            whole = AutoModelForCausalLM.from_pretrained(parsed.model.name)
            model = WholeModel(PeftModel.from_pretrained(whole, directory, is_trainable=True))
            assert same(export_adapter(model.peft_model), adapter)
            loss = held_out_loss(model, institution.test, institution.padding, 8).loss
            assert loss == pytest.approx(measured[client, kind], abs=1e-6)
        assert measured[client, "global"] != pytest.approx(measured[client, "personalised"])
        load_adapter(model.peft_model, journal.adapters[1])
        names = exported_names(model.peft_model)
        rows = [collate([example], institution.padding) for example in institution.train]
        drawn += [
            number
            for number, row in enumerate(rows)
            if all(
                torch.allclose(value.abs(), importances[client][names[name]], rtol=1e-4, atol=1e-7)
                for name, value in model.gradients_of(row).items()
            )
        ]
    assert len(drawn) == 3 and any(drawn), "rows are drawn, not taken from the beginning"


def test_clients_share_no_storage(values, tmp_path):
    journal = run_in_process(values | {"rounds": 2, "train.local-steps": 1}, tmp_path, 3)
    states = [*journal.kept.values(), *journal.adapters.values()]
    before = [{k: v.clone() for k, v in state.items()} for state in states]
    for index, state in enumerate(states):
        for tensor in state.values():
            tensor.add_(1.0)
        for other in range(index + 1, len(states)):
            assert same(states[other], before[other])


# Two weights of each client's adapter, whose means, weighted by data size, are almost 0. A sum of
# floats loses gamma's first weight unless alpha's and beta's are added before it. Gamma's second
# weight makes its adapter as large as theirs.
CANCELLING = {
    "alpha": (2.0**20, -(2.0**20)),
    "beta": (-(2.0**21), 0.0),
    "gamma": (2.0**-40, 3 * 2.0**20),
}


def with_sums_that_depend_on_the_order(reply):
    if reply.metadata.message_type == "train":
        weight, balance = CANCELLING[reply.content["config"]["name"]]
        arrays = reply.content[ARRAYS]
        name = next(iter(arrays))
        value = arrays[name].numpy().copy()
        value.flat[:2] = weight, balance
        arrays[name] = Array(value)
    return reply


def test_result_does_not_depend_on_who_answers_first(values, tmp_path):
    class Reversed(SpyingGrid):
        pull_interval = 0.01

        def pull_messages(self, message_ids):
            return super().pull_messages(i for i in message_ids if i == [*self._replies][-1])

    journals = []
    for number, kind in enumerate((SpyingGrid, Reversed)):
        journal = MemoryJournal()
        own = values | {"state-path": str(tmp_path / str(number)), "rounds": 2}
        own |= {"train.local-steps": 1}
        start(own, kind(own, with_sums_that_depend_on_the_order), journal, timeout=3600.0)
        journals.append(journal)
    for adapters in zip(*(journal.adapters.values() for journal in journals), strict=True):
        assert same(*adapters)
    assert 0 < next(iter(journals[0].adapters[1].values())).flatten()[0] < 1e-10


def test_clients_are_asked_in_the_order_of_their_names(values, tmp_path):
    own = values | {"state-path": str(tmp_path), "rounds": 1, "train.local-steps": 1}
    grid = SpyingGrid(own, nodes={1: NODES[3], 2: NODES[1], 3: NODES[2]})
    journal = MemoryJournal()
    start(own, grid, journal)
    for kind in ("train", "evaluate"):
        asked = [m.metadata.dst_node_id for m in grid.sent if m.metadata.message_type == kind]
        assert asked[-3:] == [2, 3, 1]
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert event["participants"] == ["alpha", "beta", "gamma"]


def test_a_schedule_of_learning_rates_spans_all_rounds(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "train.schedule": "linear", "train.local-steps": 2}
    journal = run_in_process(values, tmp_path, 3)
    rates = {
        (e["round"], e["client"]): e["learning_rate"]
        for e in journal.events
        if e["event"] == "train"
    }
    for client in SIZES:
        # The rates of each round's second step, where the six steps are counted from 0.
        expected = [5e-3 * (6 - step) / 6 for step in (1, 3, 5)]
        assert [rates[number, client] for number in (1, 2, 3)] == pytest.approx(expected)


def test_every_client_and_round_draws_for_itself(values, tmp_path, monkeypatch):
    """With equal rows, the order of rows and the dropout differ, but are reproducible."""
    for name in SIZES:
        write_rows(tmp_path / "data" / name / "train.jsonl", 12, seed=0)
        write_rows(tmp_path / "data" / name / "test.jsonl", 2, seed=1)
    values |= {"data.path": str(tmp_path / "data"), "strategy": "fedjudge-base", "rounds": 2}
    train, runs = fedjudge.train_round, []

    def noting(*, local_round, **others):
        runs[-1].append(local_round)
        return train(local_round=local_round, **others)

    monkeypatch.setattr(fedjudge, "train_round", noting)
    for number in range(2):
        runs.append([])
        run_in_process(values, tmp_path / str(number), 3)
    for first, second in zip(*runs, strict=True):
        assert (first.steps, first.seed) == (second.steps, second.seed)
    assert len(runs[0]) == len({local_round.seed for local_round in runs[0]}) == 6
    assert len({str(local_round.steps) for local_round in runs[0]}) == 6


def test_evaluation_only_when_due_and_at_the_end(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "evaluate.every": 2, "train.local-steps": 1}
    journal = run_in_process(values, tmp_path, 3)
    evaluated = {(e["round"], e["model"]) for e in journal.events if e["event"] == "evaluate"}
    assert evaluated == {
        (0, "base"),
        (2, "global"),
        (2, "personalised"),
        (3, "global"),
        (3, "personalised"),
    }


def test_clients_keep_the_final_adapters_and_two_rounds(values, finished):
    state, _, _ = finished
    for name in SIZES:
        (folder,) = state.glob(f"*/{name}")
        assert sorted(p.name for p in folder.iterdir()) == [
            *("adapters", "base-model.json", "config.json", "round-0002", "round-0003"),
        ]
        kept = json.loads((folder / "base-model.json").read_text())
        base = values["model.name"]
        assert kept == {"loaded from": base, "digests": fingerprint(Path(base))}
        for kind in ("global", "personalised"):
            exported = json.loads((folder / "adapters" / kind / "adapter_config.json").read_text())
            assert exported["base_model_name_or_path"] == Path(base).name


@pytest.mark.parametrize("strategy", ["fedjudge-cl", nightly("fedprox")])
def test_a_model_trained_alone_is_that_of_a_run_with_one_client(values, tmp_path, strategy):
    values |= {"train.local-steps": 2, "train.optimizer-state": "keep", "strategy": strategy}
    values |= {"fedprox.mu": 0.1 if strategy == "fedprox" else 0.0, "rounds": 2}
    without = run_in_process(values, tmp_path / "without", 3)
    journal = run_in_process(values | {"evaluate.alone": True}, tmp_path / "joint", 3)
    assert same(journal.adapters[2], without.adapters[2])
    single = {"strategy": "fedjudge-base", "fedprox.mu": 0.0, "min-nodes": 1}
    expected = run_in_process(values | single, tmp_path / "single", 1)
    (folder,) = (tmp_path / "joint").glob("*/alpha/adapters/alone")
    assert same(load_file(folder / "adapter_model.safetensors"), expected.adapters[2])
    (loss,) = (e["loss"] for e in expected.events if e.get("model") == "global" and e["round"] == 2)
    evaluated = [e for e in journal.events if e.get("model") == "alone" and e["round"] == 2]
    assert [e["client"] for e in evaluated] == sorted(SIZES)
    assert evaluated[0]["loss"] == loss
