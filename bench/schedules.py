"""Samples per second of the schedules, against centralised training (FL-GLM, table 3).

    python -m bench.schedules [--clients 2 4 8] [--schedules client-batch …] [--pairs 15]

For each number of clients K there are client-batch and hierarchical with K clients, serial, and the
whole model at the stacked batch. All take their steps in turn, bound to one core, with one torch
thread per process. A turn is a step of every client, the same samples for all: a client's step is
four micro-batches of 2 × 256 tokens, half of them targets; micro-batch j of the whole model is the
union of the clients' micro-batches j; serial takes K steps, one after another, as one client does
in its turn. Everything is float32, lanes are encrypted. A turn is over when clients *and* server
have taken their optimizer steps.

Each schedule has processes of its own: a server's, and one for each client with its head, tail and
optimizer; what doesn't take its turn waits. One number of clients is measured after another, since
what many processes hold slows all of them down. CPU seconds are user and system time of all of a
schedule's processes. Beside the ratios of medians, minima and CPU seconds stands the median of the
ratios within a round of turns ("pairs"): what slows the machine down for minutes isn't in it.

In the first step client-batch computes what the whole model does: the run fails if the losses
differ by more than 1e-4 with ``--wire float32`` (1e-2 with others). Later ones do not, since every
client trains a head and tail of its own.
"""

import argparse
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import psutil
from rich.console import Console
from rich.table import Table

from bench.split_groups import Group, serve_group, train_group
from bench.split_job import SEED, Job, Shape, random_examples
from bench.split_processes import Worker
from bench.split_step import ADAPTER, WARM_UP, Side, start_whole, summary
from finetuning.data.tokenization import Example
from finetuning.settings import SplitSettings, TrainSettings
from split.protocol.frames import WireType

_TARGET = 0.95
SCHEDULES = ("client-batch", "hierarchical", "serial")


def stacked(job: Job, clients: int) -> Job:
    """Give what the whole model trains: the union of the clients' micro-batches."""
    shape = replace(job.shape, rows=clients * job.shape.rows)
    train = job.train.model_copy(update={"batch_size": shape.rows})
    return replace(job, shape=shape, train=train, examples=random_examples)


def own_examples(job: Job, client: int, clients: int) -> list[Example]:
    """Give a client's part of the stacked micro-batches, in their order."""
    examples = random_examples(stacked(job, clients))
    return [e for i, e in enumerate(examples) if i // job.shape.rows % clients == client]


def groups_of(job: Job, split: SplitSettings, clients: int) -> dict[str, Group]:
    """Give what trains by each schedule with so many clients; serial is one client's turn."""
    jobs = [
        replace(job, examples=partial(own_examples, client=number, clients=clients))
        for number in range(clients)
    ]
    together = {
        schedule: Group(jobs, split.model_copy(update={"schedule": schedule}))
        for schedule in ("client-batch", "hierarchical")
    }
    return together | {"serial": Group([replace(jobs[0], steps=clients * job.steps)], split)}


def start(
    stack: ExitStack,
    job: Job,
    clients: int,
    groups: Mapping[str, Group],
    cores: Collection[int],
    together: bool = False,
) -> list[Side]:
    """Start groups of clients, each in processes of its own, and let all join.

    Args:
        stack: ends them.
        job: of one client.
        clients: how many there are in each group.
        groups: by their names.
        cores: that everything may use.
        together: whether a group's clients are threads of one process.

    Returns:
        The whole model at the stacked batch, and the groups.

    """
    sides = [start_whole(stack, stacked(job, clients), cores)]
    for schedule, group in groups.items():
        server = stack.enter_context(Worker(serve_group, cores, group))
        parts = [group] if together else [replace(group, jobs=[each]) for each in group.jobs]
        trainers = [stack.enter_context(Worker(train_group, cores, part)) for part in parts]
        invitations = iter(server.receive())
        _ask(trainers, [[next(invitations) for _ in part.jobs] for part in parts])
        processes = [psutil.Process(worker.pid) for worker in (*trainers, server)]

        def step(
            times: int = clients if schedule == "serial" else 1,
            server: Worker = server,
            trainers: Sequence[Worker] = trainers,
        ) -> float:
            losses: list[float] = []
            for _ in range(times):
                losses += _ask(trainers, ["step"] * len(trainers))
                server.ask("settle")
            return sum(losses) / len(losses)

        def memory(
            server: Worker = server, trainers: Sequence[Worker] = trainers
        ) -> tuple[int, int]:
            return sum(_ask(trainers, ["memory"] * len(trainers))), server.ask("memory")

        sides.append(Side(schedule, processes, step, memory=memory))
    return sides


def _ask(workers: Sequence[Worker], messages: Sequence[Any]) -> list[Any]:
    """Send each process a message before waiting for any answer."""
    for worker, message in zip(workers, messages, strict=True):
        worker.send(message)
    return [worker.receive() for worker in workers]


def check(sides: Sequence[Side], tolerance: float) -> None:
    """Compare the first losses of the whole model and of client-batch.

    Raises:
        SystemExit: client-batch computes something else than the whole model.

    """
    for side in sides:
        difference = abs(side.losses[0] - sides[0].losses[0])
        if side.name == "client-batch" and not difference <= tolerance:
            raise SystemExit(f"the first loss of client-batch differs by {difference:.2e}")


def add_rows(table: Table, clients: int, samples: int, sides: Sequence[Side]) -> None:
    """Add a row for each configuration of so many clients."""
    values = [summary(side) for side in sides]
    for side, own in zip(sides, values, strict=True):
        ratios = [f"{a / b:.3f}" for a, b in zip(values[0], own, strict=True)]
        ratios.append(f"{paired(sides[0], side):.3f}")
        target = f"≥ {_TARGET:g}" if side.name == "client-batch" else ""
        cells = [f"{value:.3f}" for value in own] + [f"{samples / own[0]:.2f}"]
        table.add_row(str(clients), side.name, *cells, *ratios, target)
    table.add_section()


def paired(whole: Side, side: Side) -> float:
    """Give the median of the whole model's seconds ÷ the schedule's in the same round."""
    both = zip(whole.seconds[WARM_UP:], side.seconds[WARM_UP:], strict=True)
    return median(a / b for a, b in both)


def main() -> None:
    """Measure all numbers of clients, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", choices=SCHEDULES, nargs="+", default=SCHEDULES)
    parser.add_argument("--pairs", type=int, default=15, help="turns that are measured")
    parser.add_argument("--wire", choices=get_args(WireType), default="bfloat16")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--columns", type=int, default=256, help="tokens of an example")
    arguments = parser.parse_args()
    console, core = Console(width=140), max(os.sched_getaffinity(0))
    shape = Shape(hidden=arguments.hidden, vocabulary=2000, columns=arguments.columns)
    split = SplitSettings(wire_dtype=arguments.wire, activation_budget=2**20, frame_timeout=3600.0)
    table = Table(title="seconds per turn; samples per second ÷ centralised")
    for heading in ("clients", "", "median", "minimum", "CPU", "samples/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading in ("medians", "minima", "CPU s", "pairs", "target"):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as directory:
        shape.save(Path(directory))
        train = TrainSettings(batch_size=shape.rows, accumulation=shape.micro_batches)
        steps = WARM_UP + arguments.pairs
        job = Job(Path(directory), shape, steps, ADAPTER, train, random_examples)
        for clients in arguments.clients:
            groups = groups_of(job, split, clients)
            chosen = {name: groups[name] for name in arguments.schedules}
            with ExitStack() as stack:
                sides = start(stack, job, clients, chosen, {core})
                for _ in range(steps):
                    for side in sides:
                        side.measure()
            check(sides, 1e-4 if split.wire_dtype == "float32" else 1e-2)
            add_rows(table, clients, clients * shape.rows * shape.micro_batches, sides)
    console.print(f"{shape}, {arguments.pairs} turns, wire {arguments.wire}, seed {SEED}")
    console.print(table)


if __name__ == "__main__":
    main()
