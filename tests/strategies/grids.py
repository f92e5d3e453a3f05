"""Runs of FedJudge in one process, and a grid that records and changes messages."""

import torch

from chambers.in_process import InProcessGrid
from federation.messages import to_arrays
from federation.run_config import parse_run_config
from finetuning.adapters.adapter import initial_adapter
from finetuning.model.fingerprint import fingerprint
from finetuning.model.locating import locate
from finetuning.randomness import derive_seed
from server_app.main import STRATEGIES
from strategies.journal import Progress
from tests.in_process import MemoryJournal

NODES = {i + 1: {"partition-id": i, "num-partitions": 3} for i in range(3)}


def start(
    values: dict,
    grid,
    journal: MemoryJournal,
    timeout: float = 0.0,
    signer=None,
    unknown=(),
    lineage="test",
):
    """Run a strategy to its end; the coordinator lacks the digests of ``unknown`` tensors."""
    config = parse_run_config(values)
    state, _ = initial_adapter(
        config.model.name, config.adapter, derive_seed("adapter", config.seed)
    )
    kind = STRATEGIES[config.strategy]
    digests = fingerprint(locate(config.model.name))
    known = {name: value for name, value in digests.items() if name not in unknown}
    strategy = kind(config, known, Progress(lineage), journal, signer)
    # These clients answer while they are asked, so there is nothing to wait for afterwards.
    strategy.start(grid, to_arrays(state), config.rounds, timeout=timeout)
    return strategy


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class SpyingGrid(InProcessGrid):
    """Records all messages, and lets a test change or drop replies."""

    def __init__(self, values, change=lambda reply: reply, nodes=NODES):
        super().__init__(values, nodes)
        self.sent, self.received, self.change = [], [], change

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.sent += messages
        replies = [self.change(reply) for reply in super().send_and_receive(messages)]
        self.received += replies
        return [reply for reply in replies if reply is not None]
