"""Cost of splitting a training step, compared with the whole model in one process.

    python -m bench.split_step [--pairs 15]

Each configuration has its own processes, which take turns of one optimizer step. Each process has
one torch thread and is bound to its cores. A split step ends when the client *and* the server have
finished their optimizer steps. CPU seconds are user and system time of all processes of a
configuration, including the proxy.

The measured lanes carry bfloat16. Before the measurement, a lane with float32 runs the first three
steps; the run fails if its losses differ by more than 1e-4 from the whole model's.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from rich.table import Table

from bench.harness import RATIOS, WARM_UP, command, make_table, ratios, show
from bench.job import SEED, Shape, TrainingJob, random_job
from bench.parties import Processes, alternate
from split.settings import SplitSettings

_COMPARED = 3  # number of first steps whose losses are compared
_TOLERANCE = 1e-4
_DELAY, _GIGABITS = 0.02, 1.0


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


def first_losses(job: TrainingJob, split: SplitSettings, core: int) -> list[float]:
    """Train the first steps with wire type float32, and return their losses."""
    job, split = replace(job, steps=_COMPARED), split.model_copy(update={"wire_dtype": "float32"})
    with ExitStack() as stack:
        side = Processes(stack, "", [job], split, {core})
        return [side.step() for _ in range(_COMPARED)]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference of the first steps' losses."""
    return max(abs(a - b) for a, b in zip(one[:_COMPARED], other[:_COMPARED], strict=True))


def main() -> None:
    """Measure, and print the table."""
    pairs = command(__doc__, pairs=15).parse_args().pairs
    cores = sorted(os.sched_getaffinity(0))
    shape = Shape()
    split = SplitSettings(frame_timeout=3600.0)
    with ExitStack() as stack:
        job = stack.enter_context(random_job(shape, WARM_UP + pairs))
        exact = first_losses(job, split, cores[-1])
        sides = start_configurations(stack, job, split, cores)
        alternate(sides, job.steps)
        most = max(side.traffic_bytes() for side in sides[1:]) / job.steps
    whole = sides[0].losses
    differences = {
        split.wire_dtype: max(largest_difference(side.losses, whole) for side in sides),
        "float32": largest_difference(exact, whole),
    }
    show(
        f"{shape}, {pairs} turns, wire type {split.wire_dtype}, seed {SEED}",
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


if __name__ == "__main__":
    main()
