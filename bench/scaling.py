"""How time and memory grow with the number of clients: ``python -m bench.scaling [--plot FILE]``.

*Average*: the coordinator averages adapters of 8 MB. *Run*: a simulated run with one round, in
which each client has a row to train ``tiny`` on, and one held out. *Step*: a step of the block
server that stacks the micro-batches of all clients, with tiny shapes; seconds are the server's CPU
time.

Each value is measured in a process of its own. The exponent is the slope of a line through the
logarithms of numbers and seconds; *last* is that of the two largest numbers.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from bench.harness import WARM_UP, BoundProcess, command, make_table, show
from bench.job import Shape, random_job
from bench.memory import Memory, status_bytes
from bench.parties import Processes, alternate
from chambers.in_process import run_in_process
from federation.run_config import Scalar
from finetuning.aggregation.weighted_mean import WeightedMean
from split.settings import SplitSettings

_WEIGHTS = 2_000_000  # of an adapter of 8 MB
_SHAPE = Shape(hidden=64, blocks=3, vocabulary=64, rows=1, columns=32, micro_batches=1)
_STEPS = 10
Value = tuple[float, float]  # seconds, and peak memory in MB


class Coordinator:
    """A process that measures its own work."""

    def average(self, count: int) -> Value:
        """Average adapters, which arrive one after another."""
        memory, mean = Memory(), WeightedMean()
        adapters = ({"weight": torch.full((_WEIGHTS,), float(n))} for n in range(count))
        started = time.perf_counter()
        for adapter in adapters:
            mean.add(adapter, 1)
        mean.result()
        return time.perf_counter() - started, memory.peak() / 1e6

    def run(self, count: int) -> Value:
        """Carry out a run."""
        with tempfile.TemporaryDirectory() as folder:
            simulate(Path(folder, "first"), 2)  # loads what all runs need
            memory, started = Memory(), time.perf_counter()
            simulate(Path(folder, "run"), count)
            return time.perf_counter() - started, memory.peak() / 1e6


def simulate(folder: Path, clients: int) -> None:
    """Carry out a run with one round of clients that have a row to train on and one held out."""
    row = json.dumps({"instruction": "Is it void?", "output": "No."})
    for number in range(clients):
        data = folder / "data" / f"client-{number:04}"
        data.mkdir(parents=True)
        for name in ("train.jsonl", "test.jsonl"):
            (data / name).write_text(f"{row}\n")
    values: dict[str, Scalar] = {
        "model.name": "tiny",
        "strategy": "fedjudge-base",
        "rounds": 1,
        "data.path": str(folder / "data"),
        "train.local-steps": 1,
        "train.batch-size": 1,
        "train.accumulation": 1,
        "min-nodes": clients,
        "output-dir": str(folder / "runs"),
        "state-path": str(folder / "state"),
    }
    run_in_process(values, clients)


def measure_step(count: int) -> Value:
    """Return the CPU seconds of the server for a step, and its peak memory."""
    split = SplitSettings(schedule="client-batch", frame_timeout=600.0)
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        job = stack.enter_context(random_job(_SHAPE, WARM_UP + _STEPS))
        side = Processes(stack, "", [job] * count, split, cores, together=True)
        alternate([side], job.steps)
        peak = status_bytes("VmHWM", side.server_pid)
    return side.server_seconds(), peak / 1e6


def measure(method: Callable[[Coordinator, int], Value], count: int) -> Value:
    """Return a value that a process measures."""
    with BoundProcess(os.sched_getaffinity(0), Coordinator) as process:
        return process.ask(method, count)


def exponent(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the slope of a line through the logarithms."""
    return float(np.polyfit(np.log(counts), np.log(seconds), 1)[0])


def draw(curves: Mapping[str, tuple[Sequence[int], Sequence[float]]], file: Path) -> None:
    """Write a log-log plot of seconds."""
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).add_subplot()
    for name, (counts, seconds) in curves.items():
        label = f"{name}: exponent {exponent(counts, seconds):.2f}"
        axes.loglog(counts, seconds, marker="o", label=label)
    axes.set(xlabel="clients or adapters", ylabel="seconds")
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """Measure, and print the table."""
    parser = command(__doc__)
    parser.add_argument("--averages", type=int, nargs="+", default=[10, 50, 200])
    parser.add_argument("--runs", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 4, 8, 16, 32])
    parser.add_argument("--plot", type=Path, help="file for a plot of seconds")
    arguments = parser.parse_args()
    kinds: dict[str, tuple[Sequence[int], Callable[[int], Value]]] = {
        "average": (arguments.averages, lambda count: measure(Coordinator.average, count)),
        "run": (arguments.runs, lambda count: measure(Coordinator.run, count)),
        "step": (arguments.steps, measure_step),
    }
    table = make_table("", "number", "seconds", "peak MB", "exponent", "last")
    curves: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for name, (counts, work) in kinds.items():
        values = [work(count) for count in counts]
        seconds = [value[0] for value in values]
        curves[name] = counts, seconds
        slopes = [
            f"{exponent(c, s):.2f}" for c, s in ((counts, seconds), (counts[-2:], seconds[-2:]))
        ]
        for count, (own, peak) in zip(counts, values, strict=True):
            table.add_row(name, str(count), f"{own:.3f}", f"{peak:.0f}", *slopes)
    show(table)
    if arguments.plot:
        draw(curves, arguments.plot)


if __name__ == "__main__":
    main()
