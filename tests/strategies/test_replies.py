"""The server stores only one reply at a time, whether the reply is used or refused."""

import weakref
from fractions import Fraction

import pytest
import torch
from flwr.app import Array

from chambers.in_process import InProcessGrid
from federation.messages import ARRAYS
from finetuning.aggregation.weighted_mean import WeightedMean
from strategies.replies import NotFiniteError, Replies
from tests.in_process import MemoryJournal
from tests.strategies.grids import NODES, start


class Forgetting(InProcessGrid):
    """Returns each reply, and checks that it is freed before the next reply is pulled."""

    def __init__(self, values):
        super().__init__(values, NODES)
        self.given = []

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages)
        for reply in replies:
            arrays = reply.content.array_records.get(ARRAYS)
            if arrays and reply.content["config"]["name"] == "beta":
                first = next(iter(arrays))
                arrays[first] = Array(arrays[first].numpy() * float("nan"))
        return replies

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        if replies[0].metadata.message_type != "query":
            assert not [kept for kept in self.given if kept() is not None]
            self.given += map(weakref.ref, replies)
        return replies


def test_one_reply_is_in_memory_at_a_time(values, tmp_path):
    own = values | {"state-path": str(tmp_path), "min-nodes": 2, "rounds": 2}
    grid, journal = Forgetting(own), MemoryJournal()
    start(own, grid, journal)
    assert len(grid.given) == 15  # three evaluations and two rounds of three clients
    assert set(journal.kept) == {"alpha", "gamma"}
    assert not list(journal.scratch.glob("*"))


def test_half_of_the_clients_are_not_most(tmp_path):
    replies, asked = Replies(tmp_path / "replies"), ("alpha", "beta", "gamma", "delta")
    replies.not_finite = ["alpha", "beta"]
    replies.require_finite(MemoryJournal(), 1, asked)
    replies.not_finite.append("gamma")
    with pytest.raises(NotFiniteError, match="at alpha, beta, gamma"):
        replies.require_finite(MemoryJournal(), 1, asked)


@pytest.mark.parametrize("weights", [(1, 1, 1), (24, 12, 8), (1, 10**9, 3)])
def test_the_mean_is_the_exact_one_rounded(weights):
    generator = torch.Generator().manual_seed(8)

    def drawn():
        exponents = torch.randint(-6, 6, (1000,), generator=generator)
        return {"w": torch.randn(1000, generator=generator) * 10.0**exponents}

    states = [drawn() for _ in weights]
    mean = WeightedMean()
    for weight, state in zip(weights, states, strict=True):
        mean.add(state, weight)
    exact = [
        float(sum(weight * Fraction(value) for weight, value in zip(weights, values, strict=True)))
        / sum(weights)
        for values in zip(*(state["w"].tolist() for state in states), strict=True)
    ]
    torch.testing.assert_close(mean.result()["w"], torch.tensor(exact), rtol=2e-7, atol=0)
