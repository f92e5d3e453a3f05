"""Samples per second of the schedules, compared with centralised training (FL-GLM, table 3).

    python -m bench.schedules [--clients 2 4 8] [--schedules client-batch …] [--pairs 15]

For each number of clients K, a schedule (client-batch and hierarchical with K clients, serial with
one) and the whole model train on the same samples in each turn: each of K clients runs one step,
serial's only client runs K steps, and the whole model runs one step, whose micro-batch j is the
union of the clients' micro-batches j. A turn ends when clients *and* server have finished their
optimizer steps.

All processes are bound to one core, with one torch thread: each schedule's server, and each of its
clients. CPU seconds are user and system time of all of a schedule's processes. The last columns are
the server's CPU seconds per sample, and centralised CPU seconds ÷ the server's: the limit of the
speed-up with more client machines.

In the first step, client-batch and the whole model compute the same, except that hidden states are
sent in bfloat16; the run fails if their losses differ by more than 1e-2.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from bench.harness import RATIOS, WARM_UP, command, make_table, ratios, show
from bench.job import SEED, Shape, TrainingJob, random_examples, random_job
from bench.parties import Processes, alternate
from finetuning.data.tokenization import Example
from split.settings import SplitSettings

SCHEDULES = ("client-batch", "hierarchical", "serial")
TARGETS = {"client-batch": "≥ 0.97"}
_TOLERANCE = 1e-2  # maximum difference between first losses


def stack_job(job: TrainingJob, clients: int) -> TrainingJob:
    """Return the whole model's job: its micro-batches are unions of the clients' micro-batches."""
    shape = replace(job.shape, rows=clients * job.shape.rows)
    return replace(job, shape=shape, examples=random_examples)


def own_examples(job: TrainingJob, client: int, clients: int) -> list[Example]:
    """Return a client's share of the whole model's examples, in the same order."""
    examples = random_examples(stack_job(job, clients))
    return [e for i, e in enumerate(examples) if i // job.shape.rows % clients == client]


def start_schedules(
    stack: ExitStack,
    job: TrainingJob,
    clients: int,
    schedules: Sequence[str],
    cores: Collection[int],
    together: bool = False,
    **settings: Any,
) -> list[Processes]:
    """Start the whole model, and the clients and server of each schedule.

    ``job`` is one client's job. Serial has one client. ``settings`` are those of `SplitSettings`;
    see `Processes` for the other arguments.
    """
    side = partial(Processes, stack, cores=cores, together=together)
    sides = [side("centralised", [stack_job(job, clients)], None)]
    for schedule in schedules:
        steps_per_turn = clients if schedule == "serial" else 1
        split = SplitSettings(
            schedule=schedule, activation_budget=2**20, frame_timeout=3600.0, **settings
        )
        longer = replace(job, steps=steps_per_turn * job.steps)
        jobs = [
            replace(longer, examples=partial(own_examples, client=number, clients=clients))
            for number in range(clients // steps_per_turn)
        ]
        sides.append(side(schedule, jobs, split, steps_per_turn=steps_per_turn))
    return sides


def check_losses(sides: Sequence[Processes], tolerance: float) -> None:
    """Exit if the first losses of the whole model, the first side, and of client-batch differ."""
    for side in sides:
        difference = abs(side.losses[0] - sides[0].losses[0])
        if side.name == "client-batch" and not difference <= tolerance:
            raise SystemExit(f"the first loss of client-batch differs by {difference:.2e}")


def compare(
    job: TrainingJob, clients: int, schedules: Sequence[str], core: Collection[int]
) -> None:
    """Measure schedules with a number of clients, and print the table.

    Each takes turns with a whole model of its own, so that not all need memory at once.
    """
    shape = job.shape
    samples = clients * shape.rows * shape.micro_batches
    table = make_table(
        *("clients", "", "centralised: samples/s", "samples/s", *RATIOS),
        *("target", "server s/sample", "limit"),
    )
    for schedule in schedules:
        with ExitStack() as stack:
            whole, side = sides = start_schedules(stack, job, clients, [schedule], core)
            alternate(sides, job.steps)
        check_losses(sides, _TOLERANCE)
        rates = [f"{samples / each.summary()[0]:.2f}" for each in sides]
        seconds = side.server_seconds()
        limit = whole.summary()[2] / seconds
        cells = [*rates, *ratios(whole, side), TARGETS.get(schedule, "")]
        table.add_row(str(clients), schedule, *cells, f"{seconds / samples:.3f}", f"{limit:.2f}")
    turns = job.steps - WARM_UP
    show(
        f"{shape}, {turns} turns, wire type {SplitSettings().wire_dtype}, seed {SEED}",
        "samples per second and ratios to centralised training",
        table,
    )


def main() -> None:
    """Measure all numbers of clients, one after another."""
    parser = command(__doc__, pairs=15)
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", choices=SCHEDULES, nargs="+", default=SCHEDULES)
    arguments = parser.parse_args()
    core = {max(os.sched_getaffinity(0))}
    with random_job(Shape(vocabulary=2000), WARM_UP + arguments.pairs) as job:
        for clients in arguments.clients:
            compare(job, clients, arguments.schedules, core)


if __name__ == "__main__":
    main()
