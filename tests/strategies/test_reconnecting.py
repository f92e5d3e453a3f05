"""Restarted SuperNodes that have the same ids as before, like SuperNodes with node keys."""

import pytest
from flwr.proto.node_pb2 import NodeInfo

from strategies.participants import TooFewClientsError
from tests.conftest import write_rows
from tests.in_process import MemoryJournal
from tests.strategies.grids import SpyingGrid, start


class Restarting(SpyingGrid):
    """Calls a function before each training round; ``since`` maps nodes to connection times."""

    def __init__(self, values, nodes, before_training):
        super().__init__(values, self.without_a_second_answer, nodes)
        self.since, self.before_training = {1: "first", 2: "first"}, before_training
        self.names = {}  # the coordinator's registered names
        self.max_answers = 2  # of each node to queries

    def get_nodes(self):
        return [
            NodeInfo(node_id=n, last_activated_at=time, name=self.names.get(n))
            for n, time in self.since.items()
        ]

    def get_node_ids(self):
        return list(self.since)

    def queries(self):
        return [m.metadata.dst_node_id for m in self.sent if m.metadata.message_type == "query"]

    def without_a_second_answer(self, reply):
        if reply.metadata.message_type != "query":
            return reply
        asked = self.queries().count(reply.metadata.src_node_id)
        return None if asked > self.max_answers else reply

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages[0].metadata.message_type == "train":
            self.before_training(self, messages[0].content["config"]["round"])
        return super().send_and_receive(messages)


@pytest.fixture
def nodes(tmp_path):
    """Return the node configs of four SuperNodes, the second and last of which are beta's."""
    data = tmp_path / "data"
    for name in ("alpha", "beta", "gamma"):
        write_rows(data / name / "train.jsonl", 12, seed=0)
        write_rows(data / name / "test.jsonl", 2, seed=1)
    names = ("alpha", "beta", "gamma", "beta")
    return {n: {"name": name, "data-path": str(data / name)} for n, name in enumerate(names, 1)}


@pytest.fixture
def own(values, tmp_path):
    """Return the settings of a run with four rounds, each with at least one client."""
    values = values | {"strategy": "fedjudge-base", "rounds": 4, "min-nodes": 1}
    values |= {"node-timeout": 1e-3, "state-path": str(tmp_path / "state")}
    return values | {"evaluate.every": 4, "train.local-steps": 1}


def participants(journal):
    return [event["participants"] for event in journal.events if event["event"] == "round"]


def test_one_with_a_new_id_takes_the_place_of_the_old_one(own, nodes):
    """Beta comes back as node 4; when node 2 returns as well, beta is still asked once.

    When node 4 goes, node 2 is beta again.
    """

    def change(grid, number):
        if number == 1:
            del grid.since[2]
            grid.since[4] = "second"
        if number == 2:
            grid.since[2] = "third"
        if number == 3:
            del grid.since[4]

    grid, journal = Restarting(own, nodes, change), MemoryJournal()
    grid.max_answers = 3
    start(own, grid, journal)
    assert participants(journal)[1:] == [["alpha", "beta"]] * 3
    (refused,) = (event for event in journal.events if event["event"] == "refused")
    assert "another SuperNode is already named 'beta'" in refused["left_out"][0]["reason"]
    trained = [m for m in grid.sent if m.metadata.message_type == "train"]
    assert [m.metadata.dst_node_id for m in trained][2:] == [1, 4, 1, 4, 1, 2]


def test_an_excluded_client_is_none_of_the_clients_that_a_run_needs(own, nodes):
    own |= {"exclude": "beta", "min-nodes": 2}
    grid = Restarting(own, nodes, lambda *_: None)
    grid.names = {1: "alpha", 2: "beta"}
    with pytest.raises(TooFewClientsError, match="1 SuperNodes were connected"):
        start(own, grid, MemoryJournal())
    assert not grid.sent


def test_a_final_evaluation_that_reaches_nobody_fails_the_run(own, nodes):
    """Resuming the run repeats it."""

    class Leaving(Restarting):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if len(participants(journal)) == 3:  # this is the last round of training
                self.since.clear()
            return replies

    journal = MemoryJournal()
    grid = Leaving(own, nodes, lambda *_: None)
    with pytest.raises(TooFewClientsError, match="evaluation after round 4: 0 valid replies"):
        start(own, grid, journal)
    assert [e["round"] for e in journal.events if e["event"] == "evaluation-missing"] == [4]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gamma", "its SuperNode is registered as 'gamma'"),
        ("", "another SuperNode is already named 'Beta'"),
    ],
)
def test_nobody_takes_the_name_of_another_registered_institution(own, nodes, name, reason):
    """While beta is away, a node registered as gamma, or without a name, claims to be beta."""
    nodes[4]["name"] = "Beta"

    def change(grid, number):
        if number == 1:
            del grid.since[2]
            grid.since[4] = "second"

    grid, journal = Restarting(own, nodes, change), MemoryJournal()
    grid.names = {1: "alpha", 2: "beta", 4: name}
    start(own, grid, journal)
    assert participants(journal)[1:] == [["alpha"]] * 3
    (refused,) = (event for event in journal.events if event["event"] == "refused")
    assert reason in refused["left_out"][0]["reason"]


def test_one_that_was_restarted_is_asked_again(own, nodes, tmp_path):
    """Beta's data changes, and gamma connects with malformed data; later both are restarted."""
    data = tmp_path / "data"
    good = (data / "gamma" / "train.jsonl").read_text()
    (data / "gamma" / "train.jsonl").write_text('{"instruction": "a"}\n')

    def change(grid, number):
        if number == 1:
            write_rows(data / "beta" / "train.jsonl", 9, seed=0)
            grid.since[3] = "second"
        if number == 2:
            (data / "gamma" / "train.jsonl").write_text(good)
            grid.since[2] = grid.since[3] = "third"
        if number == 3:
            grid.since[2] = "fourth"  # and its answer is lost

    grid, journal = Restarting(own, nodes, change), MemoryJournal()
    start(own, grid, journal)
    assert participants(journal) == [
        ["alpha"],
        ["alpha"],
        ["alpha", "beta", "gamma"],
        ["alpha", "beta", "gamma"],
    ]
    (refused,) = (event for event in journal.events if event["event"] == "refused")
    assert refused["round"] == 2 and refused["left_out"][0]["client"] == "gamma"
    assert grid.queries() == [1, 2, 3, 2, 3, 2]
    trained = [event for event in journal.events if event["event"] == "train"]
    assert [event["examples"] for event in trained if event["client"] == "beta"] == [9, 9]
