"""The schedules on a GPU, with models of 1 to 7 billion random weights: ``python -m bench.gpu``.

    python -m bench.gpu [--size 1b 3b 7b] [--clients 2 4 8] [--schedules serial …] [--pairs 15]
    python -m bench.gpu --size 7b --quantization nf4 --gradient-checkpointing

For each size and number of clients, each schedule trains in turn with the whole model at the
stacked batch: the same samples for both, as in ``bench.schedules``. Frozen weights and wire are
bfloat16, lanes are encrypted, adapters are LoRA on query, key and value. A client's micro-batch is
one example of 512 tokens, half of them targets, and its step has four of these (``--rows``,
``--columns``). One process has the clients, one the server, one the whole model, all on the first
GPU; where there are two or more, the server is on the second. A turn is over when what every
process has queued on its GPU is done. Every pair of configurations has processes of its own, so
that peaks of memory are theirs alone: bytes of tensors, loading included, without what CUDA itself
takes and what the allocator keeps.

The checkpoint is written to a temporary directory (set TMPDIR), 14 GB of it for ``7b``. The run
fails if the first losses of client-batch and the whole model differ by more than 0.05.

``--size tiny --device cpu`` tries the program where there is no GPU; its figures say nothing.
"""

import argparse
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.schedules import SCHEDULES, check, groups_of, start
from bench.split_groups import Group
from bench.split_job import SEED, Job, Shape, random_examples
from bench.split_step import ADAPTER, WARM_UP, Side, summary
from finetuning.settings import ModelSettings, SplitSettings, TrainSettings

SIZES = {
    "tiny": Shape(hidden=64, blocks=4, vocabulary=128),
    "1b": Shape(hidden=2048, blocks=22, vocabulary=32000),
    "3b": Shape(hidden=3200, blocks=26, vocabulary=32000),
    "7b": Shape(hidden=4096, blocks=32, vocabulary=32000, head_width=128),
}
_TOLERANCE = 0.05
_TARGET = 0.95


def devices(kind: str) -> tuple[str, str]:
    """Say where clients and server are.

    Raises:
        SystemExit: there is no GPU.

    """
    if kind == "cpu":
        return "cpu", "cpu"
    if not torch.cuda.is_available():
        raise SystemExit(
            "bench.gpu needs a GPU, and torch finds none (torch.cuda.is_available() is false); "
            "--size tiny --device cpu tries the program without one"
        )
    return "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"


def measure(job: Job, clients: int, schedule: str, group: Group) -> list[Side]:
    """Let the whole model and a schedule take their steps in turn."""
    with ExitStack() as stack:
        cores = os.sched_getaffinity(0)
        sides = start(stack, job, clients, {schedule: group}, cores, together=True)
        for turn in range(job.steps):
            for side in sides:
                side.measure()
            if not turn:
                check(sides, _TOLERANCE)
        for side in sides:
            side.peaks = list(side.memory())
    return sides


def add_rows(table: Table, job: Job, clients: int, whole: Side, split: Side) -> None:
    """Add a row for the whole model, and one for the schedule that was measured with it."""
    samples = clients * job.shape.rows * job.shape.micro_batches
    median, least, _ = summary(whole)
    for side in (whole, split):
        own_median, own_least, _ = summary(side)
        rates = (samples / own_median, samples * job.shape.columns / own_median)
        cells = [f"{own_median:.3f}", f"{own_least:.3f}", f"{rates[0]:.2f}", f"{rates[1]:.0f}"]
        cells += [f"{median / own_median:.3f}", f"{least / own_least:.3f}"]
        cells.append(" + ".join(f"{peak / 1e9:.2f}" for peak in side.peaks))
        target = f"≥ {_TARGET:g}" if side.name == "client-batch" else ""
        table.add_row(str(clients), side.name, *cells, target)
    table.add_section()


def run(size: str, arguments: argparse.Namespace, console: Console) -> None:
    """Measure one size with all numbers of clients and all schedules."""
    shape = replace(SIZES[size], rows=arguments.rows, columns=arguments.columns)
    client_device, server_device = devices(arguments.device)
    model = ModelSettings(
        quantization=arguments.quantization,
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    split = SplitSettings(activation_budget=2**20, frame_timeout=3600.0)
    train = TrainSettings(batch_size=shape.rows, accumulation=shape.micro_batches)
    steps = WARM_UP + arguments.pairs
    table = Table(title=f"{size}: {shape}, {model.quantization}, {arguments.pairs} turns, {SEED=}")
    for heading in ("clients", "", "median s", "minimum s", "samples/s", "tokens/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading in ("÷ centralised,\nmedians", "\nminima", "peak GB (clients\n+ server)", "target"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as place:
        shape.save(Path(place), torch.bfloat16)
        job = Job(
            Path(place),
            shape,
            steps,
            ADAPTER,
            train,
            random_examples,
            model,
            client_device,
            server_device,
        )
        for clients in arguments.clients:
            groups = groups_of(job, split, clients)
            for schedule in arguments.schedules:
                sides = measure(job, clients, schedule, groups[schedule])
                add_rows(table, job, clients, *sides)
    console.print(f"clients on {client_device}, server on {server_device}")
    console.print(table)


def main() -> None:
    """Measure all sizes, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["1b", "3b", "7b"])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", choices=SCHEDULES, nargs="+", default=SCHEDULES)
    parser.add_argument("--pairs", type=int, default=15, help="turns that are measured")
    parser.add_argument("--quantization", choices=["none", "nf4", "int8"], default="none")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--rows", type=int, default=1, help="examples of a client's micro-batch")
    parser.add_argument("--columns", type=int, default=512, help="tokens of an example")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    devices(arguments.device)
    for size in arguments.size:
        run(size, arguments, Console(width=160))


if __name__ == "__main__":
    main()
