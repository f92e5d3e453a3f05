"""Training on a GPU, with models of 1 to 7 billion random weights: ``python -m bench.gpu``.

    python -m bench.gpu [--size 1b 3b 7b] [--quantization none nf4] [--pairs 15] [--no-local]
                        [--clients 2 4 8] [--schedules serial …] [--wire-dtypes bfloat16 int8]
                        [--windows 4 2] [--separate]

Local training is measured as in ``bench.local_training``, in micro-batches of 8 examples, and the
schedules as in ``bench.schedules``, with micro-batches of one example with 512 tokens
(``--columns``). Frozen weights are bfloat16. One process runs all clients, or each client has a
process of its own (``--separate``). All processes use the first GPU, but with two or more GPUs, the
server uses the second. A peak counts the bytes of all tensors since the start of loading, but not
CUDA's context or the allocator's reserve.

The checkpoint is written to a temporary directory (set TMPDIR) and takes 14 GB for ``7b``. The run
fails if the first losses of client-batch and the whole model differ by more than 0.05.

``--size tiny --device cpu`` tests the program without a GPU; its numbers are meaningless.
"""

import os
from argparse import Namespace
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import torch

from bench.harness import RATIOS, WARM_UP, BoundProcess, command, make_table, ratios, show
from bench.job import SEED, Shape, TrainingJob, random_job
from bench.local_training import HEADINGS, LONGEST, compare
from bench.parties import alternate
from bench.schedules import SCHEDULES, TARGETS, check_losses, start_schedules
from finetuning.settings import ModelSettings
from split.protocol.frames import WireType
from split.settings import SplitSettings

SIZES = {
    "tiny": Shape(hidden=64, blocks=4, vocabulary=128),
    "1b": Shape(hidden=2048, blocks=22, vocabulary=32000),
    "3b": Shape(hidden=3200, blocks=26, vocabulary=32000),
    "7b": Shape(hidden=4096, blocks=32, vocabulary=32000, head_width=128),
}
_TOLERANCE = 0.05


def devices_of(kind: str) -> dict[str, Any]:
    """Return the devices of both parties, as settings of a job; exit if there is no GPU."""
    if kind == "cpu":
        return {"client_device": "cpu", "server_device": "cpu"}
    if not torch.cuda.is_available():
        raise SystemExit(
            "bench.gpu needs a GPU, and torch finds none (torch.cuda.is_available() is false); "
            "--size tiny --device cpu tests the program without one"
        )
    server = f"cuda:{min(1, torch.cuda.device_count() - 1)}"
    return {"client_device": "cuda:0", "server_device": server}


def measure_schedule(
    title: str, job: TrainingJob, clients: int, schedule: str, together: bool, **settings: Any
) -> None:
    """Measure the whole model and a schedule in turn, and print a table of both.

    See `start_schedules` for ``together`` and ``settings``.
    """
    table = make_table(
        *("clients", "", "median s", "minimum s", "samples/s", "tokens/s", *RATIOS),
        *("peak GB (clients + server)", "target"),
    )
    samples = clients * job.shape.rows * job.shape.micro_batches
    cores = os.sched_getaffinity(0)
    with ExitStack() as stack:
        pair = start_schedules(stack, job, clients, [schedule], cores, together, **settings)
        alternate(pair, 1)
        check_losses(pair, _TOLERANCE)
        alternate(pair, job.steps - 1)
        for each in pair:
            median, minimum, _ = each.summary()
            cells = [f"{median:.3f}", f"{minimum:.3f}", f"{samples / median:.2f}"]
            cells += [f"{samples * job.shape.columns / median:.0f}", *ratios(pair[0], each)]
            cells.append(" + ".join(f"{peak / 1e9:.2f}" for peak in each.gpu_peaks()))
            table.add_row(str(clients), each.name, *cells, TARGETS.get(each.name, ""))
    show(f"clients on {job.client_device}, server on {job.server_device}", title, table)


def measure_local(title: str, job: TrainingJob) -> None:
    """Measure local training in a new process, and print its table."""
    job = replace(job, shape=replace(job.shape, rows=8, micro_batches=2, columns=LONGEST))
    table = make_table(*HEADINGS)
    with BoundProcess(os.sched_getaffinity(0), copy, job) as worker:
        for row in worker.ask(compare, _TOLERANCE):
            table.add_row("local", *row)
    show(f"local training on {job.client_device}", title, table)


def run(size: str, arguments: Namespace) -> None:
    """Measure one size for all types of weights, numbers of clients and schedules."""
    shape = replace(SIZES[size], rows=1, columns=arguments.columns)
    steps, devices = WARM_UP + arguments.pairs, devices_of(arguments.device)
    with random_job(shape, steps, dtype=torch.bfloat16, **devices) as saved:
        for quantization in arguments.quantization:
            job = replace(saved, model=ModelSettings(quantization=quantization))
            title = f"{size}, {quantization}, {arguments.pairs} turns, {SEED=}"
            if not arguments.no_local:
                measure_local(f"{title}; ratios are Chambers ÷ Trainer", job)
            ways = (
                arguments.clients,
                arguments.schedules,
                arguments.wire_dtypes,
                arguments.windows,
            )
            for clients, schedule, wire, window in product(*ways):
                text = f"{title}, {shape}, {wire}, {window=}; ratios are centralised ÷ schedule"
                split = {"wire_dtype": wire, "window": window}
                measure_schedule(text, job, clients, schedule, not arguments.separate, **split)


def main() -> None:
    """Measure all sizes, one after another."""
    parser = command(__doc__, pairs=15)
    parser.add_argument("--size", choices=SIZES, nargs="+", default=["1b", "3b", "7b"])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--schedules", choices=SCHEDULES, nargs="*", default=SCHEDULES)
    wires = get_args(WireType)
    parser.add_argument("--wire-dtypes", choices=wires, nargs="+", default=["bfloat16"])
    parser.add_argument("--windows", type=int, nargs="+", default=[SplitSettings().window])
    parser.add_argument("--separate", action="store_true", help="a process for each client")
    parser.add_argument("--no-local", action="store_true", help="leave out local training")
    parser.add_argument(
        "--quantization", choices=["none", "nf4", "int8"], nargs="+", default=["none", "nf4"]
    )
    parser.add_argument("--columns", type=int, default=512, help="number of tokens per example")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    devices_of(arguments.device)  # refuse a machine without a GPU before anything is written
    for size in arguments.size:
        run(size, arguments)


if __name__ == "__main__":
    main()
