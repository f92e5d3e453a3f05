"""SuperNodes that were restarted and kept their ids, as those with node keys do."""

from flwr.proto.node_pb2 import NodeInfo

from bench.in_process import MemoryJournal
from tests.conftest import write_rows
from tests.strategies.grids import SpyingGrid, start


class Restarting(SpyingGrid):
    """Calls a function before each round of training; ``since`` is when each node connected."""

    def __init__(self, values, nodes, before_training):
        super().__init__(values, self.without_a_second_answer, nodes)
        self.since, self.before_training = {1: "first", 2: "first"}, before_training

    def get_nodes(self):
        return [NodeInfo(node_id=n, last_activated_at=time) for n, time in self.since.items()]

    def get_node_ids(self):
        return list(self.since)

    def queries(self):
        return [m.metadata.dst_node_id for m in self.sent if m.metadata.message_type == "query"]

    def without_a_second_answer(self, reply):
        is_query = reply.metadata.message_type == "query"
        return None if is_query and self.queries().count(reply.metadata.src_node_id) > 2 else reply

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if messages[0].metadata.message_type == "train":
            self.before_training(self, messages[0].content["config"]["round"])
        return super().send_and_receive(messages)


def test_one_that_was_restarted_is_asked_again(values, tmp_path):
    """Beta's data changes, and gamma connects with malformed data; later both are restarted."""
    data = tmp_path / "data"
    for name in ("alpha", "beta", "gamma"):
        write_rows(data / name / "train.jsonl", 12, seed=0)
        write_rows(data / name / "test.jsonl", 2, seed=1)
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
            grid.since[2] = "fourth"  # and is not heard when it is asked

    nodes = {
        number: {"name": name, "data-path": str(data / name)}
        for number, name in enumerate(("alpha", "beta", "gamma"), start=1)
    }
    own = values | {"strategy": "fedjudge-base", "rounds": 4, "min-nodes": 1, "node-timeout": 1e-3}
    own |= {"state-path": str(tmp_path / "state"), "evaluate.every": 4, "train.local-steps": 1}
    grid, journal = Restarting(own, nodes, change), MemoryJournal()
    start(own, grid, journal)
    rounds = [event["participants"] for event in journal.events if event["event"] == "round"]
    assert rounds == [["alpha"], ["alpha"], ["alpha", "beta", "gamma"], ["alpha", "beta", "gamma"]]
    (refused,) = (event for event in journal.events if event["event"] == "refused")
    assert refused["round"] == 2 and refused["left_out"][0]["client"] == "gamma (node 3)"
    assert grid.queries() == [1, 2, 3, 2, 3, 2]
    trained = [event for event in journal.events if event["event"] == "train"]
    assert [event["examples"] for event in trained if event["client"] == "beta"] == [9, 9]
