"""Gamma's replies are poisoned: the other clients learn nearly as well, and gamma is named."""

import numpy as np
import pytest
import torch
from flwr.app import Array
from flwr.proto.node_pb2 import NodeInfo

from federation.messages import ARRAYS, METRICS, SIZE, config_of, from_arrays
from finetuning.aggregation.robust_aggregation import distance
from tests.in_process import run_in_process
from tests.marks import nightly
from tests.strategies.grids import NODES, SpyingGrid

HONEST = ("alpha", "beta")


def filled(kind: str, value: float):
    """Return a function that fills the arrays in gamma's replies of type ``kind`` with a value."""

    def change(reply):
        arrays = reply.content.array_records.get(ARRAYS)
        own = arrays and config_of(reply)["name"] == "gamma"
        if own and reply.metadata.message_type == kind:
            for name, array in list(arrays.items()):
                arrays[name] = Array(np.full_like(array.numpy(), value))
        return reply

    return change


def claiming(rows: int):
    """Return a function that makes gamma report ``rows`` rows, from registration on."""

    def change(reply):
        if config_of(reply)["name"] == "gamma":
            reply.content[METRICS][SIZE] = rows
        return reply

    return change


def moved(grid: SpyingGrid, round_number: int) -> dict[str, float]:
    """Return each client's distance from the global adapter in a round, keyed by name."""
    asked = {message.metadata.message_id: message for message in grid.sent}
    distances = {}
    for reply in grid.received:
        message = asked[reply.metadata.reply_to_message_id]
        about = reply.metadata.message_type, message.content["config"]["round"]
        if about == ("train", round_number):
            states = (from_arrays(each.content[ARRAYS]) for each in (reply, message))
            distances[config_of(reply)["name"]] = distance(*states)
    return distances


def scaled_down(journal) -> list[tuple[int, str, str]]:
    events = (event for event in journal.events if event["event"] == "scaled")
    return [(e["round"], e["client"], e["what"]) for e in events]


ATTACKS = {
    "weights of 1,000": ("fedjudge-base", "train", 1e3, "update"),
    "J = 1": ("fedjudge-cl", "evaluate", 1.0, "importance"),
    "J = 2³⁰": ("fedjudge-cl", "evaluate", 2.0**30, "importance"),
    "weights of 1,000, serial": ("serial", "train", 1e3, "update"),
    "weights of 1,000, hierarchical": ("hierarchical", "train", 1e3, "update"),
}
BY_DAY = {"weights of 1,000", "J = 2³⁰"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack",
    [name if name in BY_DAY else nightly(name) for name in ATTACKS],
)
def test_the_others_learn_nearly_as_before_without_gamma(values, deep_checkpoint, tmp_path, attack):
    strategy, kind, value, what = ATTACKS[attack]
    values |= {"strategy": strategy, "min-nodes": 2}
    if strategy in {"serial", "hierarchical"}:
        values |= {"strategy": "fl-glm", "split.schedule": strategy}
        values |= {"model.name": str(deep_checkpoint), "split.wire-dtype": "float32"}
    distances = []
    for change in (lambda reply: reply, filled(kind, value)):
        folder = tmp_path / str(len(distances))
        grid = SpyingGrid(values | {"state-path": str(folder)}, change)
        journal = run_in_process(values, folder, 3, grid, rounds=2)
        distances.append(moved(grid, 2))
    before, after = distances
    assert all(0.85 * before[name] < after[name] < 1.2 * before[name] for name in HONEST)
    assert scaled_down(journal) == [(1, "gamma", what), (2, "gamma", what)]
    grid = SpyingGrid(values | {"state-path": str(folder)}, nodes={1: NODES[1], 2: NODES[2]})
    resumed = run_in_process(values, folder, 2, grid, start=(journal.progress, journal.adapters[2]))
    (last,) = (event for event in resumed.events if event["event"] == "round")
    assert (last["round"], last["participants"]) == (3, list(HONEST))
    assert all(
        0.5 * before[name] < after < 2 * before[name] for name, after in moved(grid, 3).items()
    )


@pytest.mark.parametrize(
    ("steps", "most", "rows", "agreed", "ratio"),
    [(0, 0.0, 8, None, 10), (2, 0.0, 8, {}, 3), (2, 0.0, 10**9, {}, 1), (0, 1.5, 8, {}, 1.5)],
)
def test_nobody_chooses_the_global_adapter(values, tmp_path, steps, most, rows, agreed, ratio):
    """With 8 of 44 rows, gamma sends values that would give the uncapped mean that it wants."""
    values |= {"strategy": "fedjudge-base", "rounds": 1, "train.local-steps": steps}
    values |= {"max-distance": most}

    def change(reply):
        return filled("train", 5.0 * 44 / 8)(claiming(rows)(reply))

    grid = SpyingGrid(values | {"state-path": str(tmp_path)}, change)
    journal = run_in_process(values, tmp_path, 3, grid, agreed=agreed)
    chosen = {name: torch.full_like(value, 5.0) for name, value in journal.adapters[1].items()}
    far = distance(journal.adapters[0], chosen)
    assert distance(journal.adapters[1], chosen) > 0.98 * far
    scaled = {event["what"]: event for event in journal.events if event["event"] == "scaled"}
    assert {event["client"] for event in scaled.values()} == {"gamma"}
    # Of two others, the median is the larger one.
    own, *others = (moved(grid, 1)[name] for name in ("gamma", *HONEST))
    assert scaled["update"]["factor"] * own == pytest.approx(ratio * max(others), rel=1e-5)


class AdmittedGrid(SpyingGrid):
    """A grid of SuperNodes whose keys were admitted under these names."""

    names: tuple[str, ...] = ()

    def get_nodes(self):
        names = (*self.names, *[""] * len(self.get_node_ids()))
        return [NodeInfo(node_id=n, name=names[n - 1]) for n in self.get_node_ids()]


@pytest.mark.parametrize(
    ("strategy", "rows", "agreed", "admitted", "counts"),
    [
        # In a simulation, only max-share limits gamma: 108 of 144 rows.
        ("fedjudge-cl", 10**9, None, (), 108),
        ("fl-glm", 10**9, None, (), 108),
        # Without an agreement, gamma counts three times as many rows as alpha.
        ("fedjudge-base", 10**9, {}, (*HONEST, "gamma"), 72),
        # Anyone can take a name that wasn't admitted.
        ("fedjudge-base", 10**9, {"gamma": 100}, HONEST, 72),
        ("fedjudge-base", 10**9, {"gamma": 100}, (*HONEST, "gamma"), 100),
        ("fedjudge-base", 100, {"gamma": 100}, (*HONEST, "gamma"), 100),
        ("fedjudge-base", 50, {"gamma": 100}, (*HONEST, "gamma"), 50),
    ],
)
def test_a_claim_of_many_rows_does_not_take_all_the_weight(
    values, deep_checkpoint, tmp_path, strategy, rows, agreed, admitted, counts
):
    if strategy == "fl-glm":
        values |= {"model.name": str(deep_checkpoint), "split.wire-dtype": "float32"}
        values |= {"split.schedule": "hierarchical"}
    values |= {"strategy": strategy, "rounds": 2, "train.local-steps": 2}
    grid = AdmittedGrid(values | {"state-path": str(tmp_path)}, claiming(rows))
    grid.names = admitted
    journal = run_in_process(values, tmp_path, 3, grid, rounds=1, agreed=agreed)
    counted = {"alpha": 24, "beta": 12, "gamma": counts}
    total = sum(counted.values())
    for name, average in journal.adapters[1].items():
        mean = sum(counted[c] * own[name].double() for c, own in journal.kept.items()) / total
        torch.testing.assert_close(average.double(), mean, rtol=1e-5, atol=1e-7)
    assert scaled_down(journal) == [(1, "gamma", "data size")] * (counts < rows)
    if strategy == "fedjudge-cl":
        importance = {
            config_of(reply)["name"]: from_arrays(reply.content[ARRAYS])
            for reply in grid.received
            if reply.metadata.message_type == "evaluate" and ARRAYS in reply.content.array_records
        }
        for name, average in journal.progress.importance.items():
            mean = sum(counted[c] * own[name].double() for c, own in importance.items()) / total
            torch.testing.assert_close(average.double(), mean, rtol=1e-5, atol=1e-9)


def test_a_claim_of_many_rows_lowers_the_cap_at_the_server(values, deep_checkpoint, tmp_path):
    values |= {"model.name": str(deep_checkpoint), "split.wire-dtype": "float32"}
    values |= {"strategy": "fl-glm", "split.schedule": "hierarchical", "train.local-steps": 2}
    grid = SpyingGrid(values | {"state-path": str(tmp_path)}, claiming(10**9))
    journal = run_in_process(values, tmp_path, 3, grid, rounds=1, agreed={})
    # Gamma's updates are hardly longer than the others'.
    assert (1, "gamma", "update at the server") in scaled_down(journal)
