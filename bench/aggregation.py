"""Memory and time of averaging many clients' adapters, compared with Flower's FedAvg.

    python -m bench.aggregation

The adapters are LoRA of rank 16 on all linear layers of a model with 32 blocks and hidden size
4,096: 40 million parameters, 160 MB. Flower's ``FedAvg`` and Chambers' FedJudge-Base each run one
round without evaluation, in a fresh process. An in-process grid generates each reply from random
numbers when it is pulled; this time is not counted. ``FedAvg`` pulls all replies and averages them
at once. Chambers pulls them one by one, checks them, stores them on disk, writes each client's
personalised adapter, averages them, and writes the global adapter, a checkpoint and the report.

Memory is the largest growth of the process's resident memory (VmHWM, which includes mapped files)
after a warm-up run with small adapters. The two averages are compared value by value.
"""

import logging
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig

from bench.harness import Worker, command, make_table, show
from bench.memory_use import Memory
from chambers.in_process import InProcessGrid
from federation.messages import SIZE, State, answer, config_of, from_arrays, to_arrays
from federation.run_config import parse_run_config
from server_app.results import Results
from strategies.fedjudge import FedJudgeBase
from strategies.journal import Progress

_NODES, _BLOCKS = (10, 50), 32
RANK, HIDDEN, INNER = 16, 4096, 11008
MODULES = {
    **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qkvo"},
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (HIDDEN, INNER)),
    "mlp.down_proj": (INNER, HIDDEN),
}
FINGERPRINT = {"tensor": "0" * 64}


def draw_adapter(blocks: int, seed: int) -> State:
    """Return a random adapter."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"base_model.model.model.layers.{block}.{module}.lora_{kind}.weight": 0.01
        * torch.randn(shape, generator=generator)
        for block in range(blocks)
        for module, (inputs, outputs) in MODULES.items()
        for kind, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK)))
    }


class RandomClients(InProcessGrid):
    """Clients whose replies are generated when pulled, with adapters for ``blocks`` blocks."""

    def __init__(self, clients: int, blocks: int) -> None:
        super().__init__({}, {node: {} for node in range(1, clients + 1)})
        self._blocks = blocks
        self._messages: dict[str, Message] = {}
        self.seconds = 0.0  # time spent on generating replies

    def _ask(self, messages: Iterable[Message]) -> None:
        self._messages = {each.metadata.message_id: each for each in messages}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return a reply to each message."""
        started = time.perf_counter()
        replies = [self._reply(self._messages.pop(identifier)) for identifier in message_ids]
        self.seconds += time.perf_counter() - started
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return all replies at once, like Flower's grids."""
        return self.pull_messages(self.push_messages(messages))

    def _reply(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        metrics = {SIZE: 100 * node}
        config = {"name": f"client-{node:03}", "base": config_of(message).get("base", "")}
        if message.metadata.message_type == "query":
            digests = {"tensors": list(FINGERPRINT), "digests": list(FINGERPRINT.values())}
            return answer(message, config | digests, metrics)
        arrays = to_arrays(draw_adapter(self._blocks, node))
        return answer(message, config, metrics | {"loss": 1.0}, arrays)


class Averaging:
    """FedAvg or Chambers in its own process, warmed up with small adapters."""

    def __init__(self, side: str) -> None:
        logging.getLogger("flwr").setLevel(logging.ERROR)
        self._side = side
        self._average(clients=2, blocks=1)

    def measure(self, clients: int) -> tuple[ArrayRecord, int, float]:
        """Run a round, and return the average, the peak memory in bytes, and the seconds."""
        memory = Memory()
        averaged, seconds = self._average(clients, _BLOCKS)
        return averaged, memory.peak(), seconds

    def _average(self, clients: int, blocks: int) -> tuple[ArrayRecord, float]:
        """Return the average, and the seconds spent, except on generating replies."""
        grid = RandomClients(clients, blocks)
        initial = to_arrays(draw_adapter(blocks, 0))
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            if self._side == "FedAvg":
                strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
                averaged = strategy.start(grid, initial, num_rounds=1).arrays
            else:
                # Only training is measured: the first of two rounds has no evaluation.
                settings = {"min-nodes": clients, "rounds": 2, "evaluate.every": 2}
                config = parse_run_config({"strategy": "fedjudge-base", **settings})
                results = Results(Path(folder), config, "random", LoraConfig(r=RANK))
                results.describe(FINGERPRINT)
                own = FedJudgeBase(config, FINGERPRINT, Progress("bench", evaluated=True), results)
                averaged = own.start(grid, initial, num_rounds=1).arrays
                results.close()
            seconds = time.perf_counter() - started - grid.seconds
        return averaged, seconds


def largest_difference(one: State, other: State) -> float:
    """Return two averages' largest difference, relative to the largest value of ``one``."""
    if one.keys() != other.keys():
        raise SystemExit("the averages have different tensors")
    scale = max(float(value.abs().max()) for value in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one) / scale


def main() -> None:
    """Measure FedAvg and Chambers for each number of nodes."""
    command(__doc__).parse_args()
    size = sum(value.numel() for value in draw_adapter(_BLOCKS, 0).values())
    table = make_table("nodes", "", "peak MB", "÷ adapter", "seconds", "difference")
    for nodes in _NODES:
        averages: list[State] = []
        for side in ("FedAvg", "Chambers"):
            with Worker(os.sched_getaffinity(0), Averaging, side) as worker:
                averaged, peak, seconds = worker.ask(Averaging.measure, nodes)
            averages.append(from_arrays(averaged))
            cells = [f"{peak / 1e6:,.0f}", f"{peak / (4 * size):.1f}", f"{seconds:.1f}"]
            difference = f"{largest_difference(*averages):.1e}" if averages[1:] else ""
            table.add_row(str(nodes), side, *cells, difference)
    show(f"averaging one round: {size:,} parameters, {4 * size / 1e6:,.0f} MB", table)


if __name__ == "__main__":
    main()
