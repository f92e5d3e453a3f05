"""Clients that don't reply are named long before their time is over, and left out when gone."""

import pytest
from flwr.proto.node_pb2 import NodeInfo

from strategies.participants import RefusedError
from tests.in_process import MemoryJournal
from tests.strategies.grids import SpyingGrid, start

HELD = 2  # beta's node
WAITING = "Waiting since %s UTC (%.0f s) for replies: %s"


class Holding(SpyingGrid):
    """Holds beta's reply to messages of one type, or loses it, with beta's SuperNode."""

    pull_interval = 0.01

    def __init__(self, values, kind, is_held=lambda: True, goes=False, name=None):
        super().__init__(values)
        self.kind, self.is_held, self.goes, self.name = kind, is_held, goes, name

    def get_node_ids(self):
        gone = self.goes and any(m.metadata.message_type == self.kind for m in self.sent)
        return [node for node in super().get_node_ids() if not (gone and node == HELD)]

    def get_nodes(self):
        at = "2026-11-27T08:00:00.123456+00:00"
        names = {HELD: self.name}
        return [
            NodeInfo(node_id=n, last_activated_at=at, name=names.get(n))
            for n in self.get_node_ids()
        ]

    def pull_messages(self, message_ids):
        replies = [self._replies.get(each) for each in message_ids]
        held = any(
            reply and (reply.metadata.src_node_id, reply.metadata.message_type) == (HELD, self.kind)
            for reply in replies
        )
        return [] if held and self.is_held() else super().pull_messages(message_ids)


@pytest.fixture
def own(values, tmp_path):
    values |= {"strategy": "fedjudge-base", "rounds": 1, "min-nodes": 2, "train.local-steps": 1}
    return values | {"node-timeout": 0.05, "round-timeout": 60.0, "state-path": str(tmp_path)}


def lines(caplog):
    return [record.args for record in caplog.records if record.msg == WAITING]


@pytest.mark.parametrize(
    ("kind", "name", "called"),
    [
        ("query", None, "node 2"),
        ("query", "beta", "beta"),
        ("train", None, "beta"),
        ("evaluate", "beta", "beta"),
    ],
)
def test_a_silent_client_is_named_while_others_wait_for_it(own, caplog, kind, name, called):
    """Three times, so that it can be seen that the waiting time doubles."""
    grid = Holding(own, kind, lambda: len(lines(caplog)) < 3, name=name)
    start(own, grid, MemoryJournal(), timeout=60.0)
    passed = [seconds for _, seconds, _ in lines(caplog)]
    assert passed[0] >= 0.05 and passed[1] >= 0.1 and passed[2] >= 0.2
    told = f"{called} (its SuperNode has been connected since 2026-11-27 08:00:00 UTC)"
    assert {text for _, _, text in lines(caplog)} == {told}


def test_the_run_does_not_wait_for_a_supernode_that_is_gone(own, caplog):
    grid = Holding(own, "query", goes=True, name="beta")
    with pytest.raises(RefusedError, match="beta: its SuperNode is no longer connected"):
        start(own, grid, MemoryJournal(), timeout=60.0)
    journal = MemoryJournal()
    start(own, Holding(own, "train", goes=True), journal, timeout=60.0)
    (event,) = (event for event in journal.events if event["event"] == "round")
    assert event["participants"] == ["alpha", "gamma"]
    reason = "its SuperNode is no longer connected"
    assert event["left_out"] == [{"client": "beta", "reason": reason}]
    assert not lines(caplog)


@pytest.mark.parametrize(
    ("minimum", "sample", "warned"),
    [(3, 1.0, True), (2, 0.1, True), (2, 1.0, False), (1, 0.1, False)],
)
def test_a_run_that_one_failed_reply_would_end_says_so_first(own, caplog, minimum, sample, warned):
    own |= {"rounds": 0, "min-nodes": minimum, "sample": sample}
    start(own, SpyingGrid(own), MemoryJournal())
    told = f"With min-nodes = {minimum - 1}, it continues without that client"
    assert (told in caplog.text) is warned
