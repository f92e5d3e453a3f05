"""The messages of FL-GLM: the invited clients, their order, and the server's key."""

import pytest
from flwr.app import MessageType

from chambers.in_process import InProcessGrid
from federation.messages import invitation_of
from tests.in_process import run_in_process


class Noting(InProcessGrid):
    """Records each message's round, kind, client and server key."""

    def __init__(self, values, nodes):
        super().__init__(values, nodes)
        self.keys = []

    def _answer(self, message):
        if message.metadata.message_type != MessageType.QUERY:
            invitation = invitation_of(message)
            about = (invitation.identity.round, message.metadata.message_type)
            self.keys.append((*about, invitation.identity.node, invitation.server_key))
        return super()._answer(message)


@pytest.mark.parametrize("every", [1, 2])
def test_keys_are_renewed_only_after_the_set_rounds(split_values, tmp_path, every):
    values = split_values | {"split.rotate-keys-every": every, "rounds": 4, "min-nodes": 1}
    values |= {"train.local-steps": 1, "state-path": str(tmp_path)}
    grid = Noting(values, {1: {"partition-id": 0, "num-partitions": 3}})
    run_in_process(values, tmp_path, 1, grid)
    assert [note[:2] for note in grid.keys[:3]] == [(0, "evaluate"), (1, "train"), (1, "evaluate")]
    # Before the first round, the key of the first round is used.
    periods = [(max(1, number) - 1) // every for number, _, _, _ in grid.keys]
    keys = [key for *_, key in grid.keys]
    assert [keys.index(key) for key in keys] == [periods.index(period) for period in periods]


def test_turns_go_by_name_whatever_the_nodes_ids(split_values, tmp_path):
    values = split_values | {
        "rounds": 1,
        "train.local-steps": 1,
        "split.order": "names",
        "state-path": str(tmp_path),
    }
    partitions = {1: 2, 2: 0, 3: 1}
    nodes = {n: {"partition-id": i, "num-partitions": 3} for n, i in partitions.items()}
    grid = Noting(values, nodes)
    run_in_process(values, tmp_path, 3, grid)
    asked = [client for *_, client, _ in grid.keys]
    assert asked == ["alpha", "beta", "gamma"] * 3  # evaluated, trained, evaluated
