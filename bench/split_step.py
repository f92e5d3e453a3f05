"""Cost of splitting a training step, compared with the whole model in one process.

    python -m bench.split_step [--pairs 15] [--record FILE]

Each configuration has its own processes, which take turns of one optimizer step; the first two
turns are a warm-up. Each process has one torch thread and is bound to its cores. A step has four
micro-batches of 2 × 256 tokens, half of them targets. Computation is in float32, and lanes are
encrypted. All configurations train on the same examples from the same initial adapter, through
``train_round``. A split step ends when the client *and* the server have finished their optimizer
steps. CPU seconds are user and system time of all processes of a configuration, including the
proxy.

The measured lanes carry bfloat16. Before the measurement, a lane with float32 runs the first three
steps; the run fails if its losses differ by more than 1e-4 from the whole model's.
``--record docs/recorded/split_step.json`` also writes the result as JSON, with a breakdown of the
time of a step.
"""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.harness import RATIOS, WARM_UP, command, compared_with, make_table, ratios, show
from bench.job import SEED, Shape, TrainingJob, random_job
from bench.parties import Processes, alternate
from split.settings import SplitSettings

_COMPARED = 3  # number of first steps whose losses are compared
_TOLERANCE = 1e-4
_DELAY, _GIGABITS = 0.02, 1.0
Breakdown = dict[str, dict[str, float]]


def start_configurations(
    stack: ExitStack, job: TrainingJob, split: SplitSettings, cores: Sequence[int]
) -> list[Processes]:
    """Start every configuration; those with two cores only if there are two."""
    one, other = {cores[-1]}, {cores[0]}
    lane = partial(Processes, stack, jobs=[job], split=split, cores=one, server_cores=other)
    sides = [lane("centralised", split=None), lane("split, all on this core", server_cores=one)]
    if one != other:
        far = partial(lane, line=(_DELAY, _GIGABITS))
        sides += [
            lane("split, a core each"),
            far(f"… {1000 * _DELAY:g} ms each way, {_GIGABITS:g} Gbit/s"),
            far("… and window 1", split=split.model_copy(update={"window": 1})),
        ]
    return sides


def make_comparison(sides: Sequence[Processes]) -> Table:
    """Return each configuration's seconds, and its ratios to another configuration."""
    table = make_table("", "median", "minimum", "CPU", "÷", *RATIOS, "target")
    # Lanes without a proxy are compared with the whole model, others with the two-core lane.
    bases = (None, 0, 0, 2, 2)
    targets = ("", "≤ 1.02", "≤ 0.75", "≤ 1.05", "")
    for number, (side, base, target) in enumerate(zip(sides, bases, targets, strict=False), 1):
        cells = [f"{value:.3f}" for value in side.summary()]
        if base is not None:
            cells += [f"({base + 1})", *ratios(side, sides[base]), target]
        table.add_row(f"({number}) {side.name}", *cells)
    return table


def break_down(side: Processes) -> Breakdown:
    """Return a breakdown of a split side's time, in seconds per step, including the warm-up.

    A client's ``seconds_computing`` are CPU time of its thread, and ``cpu`` is the CPU time of a
    whole process. All other seconds are wall-clock time.
    """
    (client,), (server,) = side.accounts()
    steps = len(side.losses)
    cpu = [sum(each) / steps for each in zip(*side.cpu, strict=True)]
    result: Breakdown = {
        party: {key: value / steps for key, value in account.items() if key.startswith("seconds_")}
        for party, account in (("client", client), ("server", server))
    }
    for party, seconds in zip(("client", "server", "proxy"), cpu, strict=False):
        result.setdefault(party, {})["cpu"] = seconds
    result["bytes"] = {key: client[key] / steps for key in ("bytes_up", "bytes_down")}
    return result


def first_losses(job: TrainingJob, split: SplitSettings, core: int) -> list[float]:
    """Train the first steps with wire type float32, and return their losses."""
    job, split = replace(job, steps=_COMPARED), split.model_copy(update={"wire_dtype": "float32"})
    with ExitStack() as stack:
        side = Processes(stack, "", [job], split, {core})
        return [side.step() for _ in range(_COMPARED)]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of the first steps' losses."""
    return max(abs(a - b) for a, b in zip(one[:_COMPARED], other[:_COMPARED], strict=True))


def make_record(
    sides: Sequence[Processes], accounts: Sequence[Breakdown], wire: str
) -> dict[str, Any]:
    """Return times, their ratios to the whole model's and their breakdown, for a JSON file."""
    result = []
    for side, account in zip(sides, (None, *accounts), strict=True):
        times = dict(zip(("median", "minimum", "cpu"), side.summary(), strict=True))
        entry = {"name": side.name, "seconds": times, "ratios": compared_with(side, sides[0])}
        result.append(entry | ({"spent": account} if account else {}))
    return {"pairs": len(sides[0].seconds) - WARM_UP, "wire": wire, "sides": result}


def main() -> None:
    """Measure, and print the table."""
    parser = command(__doc__, pairs=15)
    parser.add_argument("--record", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    shape = Shape()
    split = SplitSettings(frame_timeout=3600.0)
    with ExitStack() as stack:
        job = stack.enter_context(random_job(shape, WARM_UP + arguments.pairs))
        exact = first_losses(job, split, cores[-1])
        sides = start_configurations(stack, job, split, cores)
        alternate(sides, job.steps)
        accounts = [break_down(side) for side in sides[1:]]
    whole = sides[0].losses
    most = max(sum(account["bytes"].values()) for account in accounts)
    differences = {
        split.wire_dtype: max(largest_difference(side.losses, whole) for side in sides),
        "float32": largest_difference(exact, whole),
    }
    show(
        f"{shape}, {arguments.pairs} turns, wire type {split.wire_dtype}, seed {SEED}",
        "seconds per step, and ratios",
        make_comparison(sides),
        f"at most {most / 1000:.1f} kilobytes per step in both directions, "
        f"{most / shape.step_bytes:.4f} × 4 · tokens · hidden · 2 bytes",
        *(
            f"largest difference between split and centralised in the first {_COMPARED} losses, "
            f"wire type {wire}: {own:.1e}"
            for wire, own in differences.items()
        ),
    )
    if not differences["float32"] <= _TOLERANCE:
        raise SystemExit(f"the losses differ by more than {_TOLERANCE}")
    if arguments.record:
        result = make_record(sides, accounts, split.wire_dtype)
        arguments.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
