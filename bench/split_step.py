"""What splitting a training step costs, against the whole model in one process.

    python -m bench.split_step [--pairs 15] [--wire bfloat16]
    python -m bench.split_step --wires

Every configuration has its own processes, which stay for the whole run and take one optimizer step
in turn; two steps warm up. Each process has one torch thread and is bound to its cores. A step is
four micro-batches of 2 × 256 tokens, half of them targets, in float32; lanes are encrypted. All
train on the same examples from the same adapter, through ``finetuning.training.train_round``. A
split step is over when the client has taken its optimizer step *and* the server its own. CPU
seconds are user and system time of all processes of a configuration, the proxy among them.

The run fails if the losses of the first steps differ by more than 1e-4 from the whole model's:
those of the measured lanes with ``--wire float32``, with other wires those of a lane that trains
these steps alone, before anything is measured. ``--wires`` compares what the wires carry, and what
they do to the loss; see ``bench.split_wires``.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import psutil
from rich.console import Console
from rich.table import Table

from bench.proxy import proxying
from bench.split_job import SEED, Job, Shape, random_examples
from bench.split_processes import Worker, serve, train_split, train_whole
from bench.split_wires import compare_wires
from finetuning.settings import AdapterSettings, SplitSettings, TrainSettings
from split.protocol.frames import WireType

ADAPTER = AdapterSettings(rank=4, alpha=16, dropout=0.0, targets="q_proj,k_proj,v_proj")
WARM_UP = 2
_COMPARED = 3  # steps whose losses must be equal
_TOLERANCE = 1e-4
_DELAY, _GIGABITS = 0.02, 1.0


@dataclass
class Side:
    """A configuration and what was measured of it, a value per step.

    Attributes:
        name: for the tables.
        processes: all that take part in its steps.
        step: takes a step and gives its loss.
        against: the configuration that its ratios are of; None has none.
        target: the largest ratio that is aimed at.
        finish: gives the accounts of client and server; None where there is no lane.
        memory: after all steps, gives the peak of GPU memory of each process.
        peaks: which it gave.

    """

    name: str
    processes: Sequence[psutil.Process]
    step: Callable[[], float]
    against: "Side | None" = None
    target: float | None = None
    finish: Callable[[], tuple[dict[str, Any], dict[str, Any]]] | None = None
    memory: Callable[[], Sequence[int]] = tuple
    seconds: list[float] = field(default_factory=list)
    cpu: list[list[float]] = field(default_factory=list)  # per step, of each process
    losses: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    def measure(self) -> None:
        """Take a step."""
        before = [_cpu_seconds(process) for process in self.processes]
        started = time.perf_counter()
        self.losses.append(self.step())
        self.seconds.append(time.perf_counter() - started)
        after = [_cpu_seconds(process) for process in self.processes]
        self.cpu.append([b - a for a, b in zip(before, after, strict=True)])


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def start_whole(stack: ExitStack, job: Job, cores: Collection[int]) -> Side:
    """Start the whole model on some cores."""
    worker = stack.enter_context(Worker(train_whole, cores, job))
    worker.receive()
    processes = [psutil.Process(worker.pid)]
    return Side("centralised", processes, worker.ask, memory=lambda: [worker.ask()])


def start_split(
    stack: ExitStack,
    job: Job,
    split: SplitSettings,
    cores: tuple[int, int],
    name: str,
    proxied: bool = False,
) -> Side:
    """Start a server and a client, and open their lane.

    Args:
        stack: ends them.
        job: what is trained.
        split: the server's and the client's settings.
        cores: the server's and the client's.
        name: of the configuration.
        proxied: whether there is a delay between them, and a limited rate.

    """
    server = stack.enter_context(Worker(serve, {cores[0]}, job, split))
    client = stack.enter_context(Worker(train_split, {cores[1]}, job, split))
    invitation, pids = server.receive(), [client.pid, server.pid]
    if proxied:
        line = proxying(invitation.address, _DELAY, _GIGABITS)
        address, pid = stack.enter_context(line)
        invitation = replace(invitation, address=address)
        pids.append(pid)
    client.ask(invitation)

    def step() -> float:
        loss = float(client.ask())
        server.ask("settle")
        return loss

    def finish() -> tuple[dict[str, Any], dict[str, Any]]:
        account = client.ask()
        return account, server.ask("finish")

    return Side(name, [psutil.Process(pid) for pid in pids], step, finish=finish)


def start_all(stack: ExitStack, job: Job, split: SplitSettings, cores: Sequence[int]) -> list[Side]:
    """Start every configuration; those with two cores only where there are two."""
    one, other = cores[-1], cores[0]
    whole = start_whole(stack, job, {one})
    whole.name = "centralised, one core"
    single = start_split(stack, job, split, (one, one), "split, all on this core")
    single.against, single.target = whole, 1.05
    if one == other:
        return [whole, single]
    pair = start_split(stack, job, split, (other, one), "split, a core each")
    pair.against, pair.target = whole, 0.75
    name = f"… {1000 * _DELAY:g} ms each way, {_GIGABITS:g} Gbit/s"
    far = start_split(stack, job, split, (other, one), name, True)
    far.against, far.target = pair, 1.15
    narrow = split.model_copy(update={"window": 1})
    slow = start_split(stack, job, narrow, (other, one), "… and window 1", True)
    slow.against = pair
    return [whole, single, pair, far, slow]


def print_ratios(console: Console, sides: Sequence[Side]) -> None:
    """Print each configuration's seconds, and what they are of another's."""
    table = Table(title="seconds per step, and ratios")
    table.add_column("")
    for heading in ("median", "minimum", "CPU", "÷", "medians", "minima", "CPU s", "target"):
        table.add_column(heading, justify="right")
    for side in sides:
        values = summary(side)
        cells = [f"{value:.3f}" for value in values]
        if side.against is not None:
            cells.append(f"({sides.index(side.against) + 1})")
            others = summary(side.against)
            cells += [f"{a / b:.3f}" for a, b in zip(values, others, strict=True)]
        if side.target is not None:
            cells.append(f"≤ {side.target:g}")
        table.add_row(f"({sides.index(side) + 1}) {side.name}", *cells)
    console.print(table)


def summary(side: Side) -> tuple[float, float, float]:
    """Give median and minimum seconds per step, and mean CPU seconds, without the warm-up."""
    seconds, cpu = side.seconds[WARM_UP:], side.cpu[WARM_UP:]
    return median(seconds), min(seconds), sum(map(sum, cpu)) / len(cpu)


def print_accounts(console: Console, sides: Sequence[Side], shape: Shape) -> None:
    """Print where the time of the split steps goes, and what they carry."""
    where = Table(
        title="milliseconds per step, the warm-up included; training in CPU time, CPU of the whole "
        "process, the rest by the clock"
    )
    carried = Table(title="kilobytes per step")
    for table, headings in (
        (where, ["client:\ntraining", "\nwaiting", "\ncrypto", "\npacking", "\nCPU"]),
        (where, ["server:\ncomputing", "\nqueued", "\ncrypto", "\npacking", "\nCPU"]),
        (where, ["proxy:\nCPU"]),
        (carried, ["up", "down", "÷ (4 · tokens · hidden · 2 bytes)"]),
    ):
        if not table.columns:
            table.add_column("")
        for heading in headings:
            table.add_column(heading, justify="right")
    names = ("seconds_computing", "seconds_waiting", "seconds_crypto", "seconds_serialisation")
    least = 4 * shape.tokens * shape.micro_batches * shape.hidden * 2
    for number, side in enumerate(sides, 1):
        if side.finish is None:
            continue
        client, server = side.finish()
        steps = len(side.losses)
        cpu = [sum(each) / steps for each in zip(*side.cpu, strict=True)]
        values = [*(client[name] / steps for name in names), cpu[0]]
        names_there = (names[0], "seconds_queued", *names[2:])
        values += [*(server[name] / steps for name in names_there), *cpu[1:]]
        where.add_row(f"({number})", *(f"{1000 * value:.0f}" for value in values))
        up, down = client["bytes_up"] / steps, client["bytes_down"] / steps
        share = (up + down) / least
        carried.add_row(f"({number})", f"{up / 1000:.1f}", f"{down / 1000:.1f}", f"{share:.4f}")
    console.print(where)
    console.print(carried)


def first_losses(job: Job, split: SplitSettings, core: int) -> list[float]:
    """Train the first steps with a float32 wire, and give their losses."""
    exact = split.model_copy(update={"wire_dtype": "float32"})
    with ExitStack() as stack:
        side = start_split(stack, replace(job, steps=_COMPARED), exact, (core, core), "")
        return [side.step() for _ in range(_COMPARED)]


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Give the largest difference of the first steps' losses."""
    pairs = zip(one[:_COMPARED], other[:_COMPARED], strict=True)
    return max(abs(a - b) for a, b in pairs)


def compare(shape: Shape, pairs: int, split: SplitSettings, console: Console) -> None:
    """Run all configurations in turn, and print the tables.

    Raises:
        SystemExit: the losses of a step differ.

    """
    cores = sorted(os.sched_getaffinity(0))
    wire = split.wire_dtype
    train = TrainSettings(batch_size=shape.rows, accumulation=shape.micro_batches)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        job = Job(Path(directory), shape, WARM_UP + pairs, ADAPTER, train, random_examples)
        shape.save(job.directory)
        exact = None if wire == "float32" else first_losses(job, split, cores[-1])
        sides = start_all(stack, job, split, cores)
        for _ in range(job.steps):
            for side in sides:
                side.measure()
        ends = f"{split.head_blocks} + {split.tail_blocks} blocks at the client"
        console.print(f"{shape}, {ends}, {pairs} pairs of steps, wire {wire}, seed {SEED}")
        print_ratios(console, sides)
        print_accounts(console, sides, shape)
    own = {side.name: difference(side.losses, sides[0].losses) for side in sides[1:]}
    console.print(f"largest difference of the first {_COMPARED} losses, wire {wire}: {own}")
    if exact is not None:
        own = {"a lane": difference(exact, sides[0].losses)}
        console.print(f"largest difference of the first {_COMPARED} losses, wire float32: {own}")
    if not max(own.values()) <= _TOLERANCE:
        raise SystemExit(f"the losses differ by more than {_TOLERANCE}")


def main() -> None:
    """Compare split with centralised steps, or the wires with one another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--wire", choices=get_args(WireType), default="bfloat16")
    parser.add_argument("--wires", action="store_true", help="compare the wires instead")
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--blocks", type=int, default=Shape.blocks)
    parser.add_argument("--head-blocks", type=int, default=1, help="at the client")
    parser.add_argument("--tail-blocks", type=int, default=1, help="at the client")
    arguments = parser.parse_args()
    console = Console(width=140)
    if arguments.wires:
        compare_wires(console)
    else:
        shape = Shape(hidden=arguments.hidden, blocks=arguments.blocks)
        split = SplitSettings(
            wire_dtype=arguments.wire,
            head_blocks=arguments.head_blocks,
            tail_blocks=arguments.tail_blocks,
            frame_timeout=3600.0,
        )
        compare(shape, arguments.pairs, split, console)


if __name__ == "__main__":
    main()
