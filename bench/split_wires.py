"""What each wire carries, and what it does to training: ``python -m bench.split_step --wires``.

A small random Llama learns with LoRA on every linear module which of a few tokens follows which;
each wire trains it over a lane of its own on the same data from the same adapter, and so does the
whole model in one process.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from typing import get_args

import torch
from rich.console import Console
from rich.table import Table

from bench.split_job import SEED, Job, Shape
from bench.split_processes import Worker, serve, train_split, train_whole
from finetuning.data.tokenization import Example
from finetuning.settings import AdapterSettings, SplitSettings, TrainSettings
from split.protocol.frames import WireType

_SHAPE = Shape(hidden=256, blocks=6, vocabulary=1000, rows=2, columns=128, micro_batches=4)
_STEPS = 100
_LAST = 10  # steps whose mean loss is compared
_USED_TOKENS = 50
_NOISE = 0.1
_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_ADAPTER = AdapterSettings(rank=8, alpha=32, dropout=0.0, targets=_TARGETS)
_TRAIN = TrainSettings(
    batch_size=_SHAPE.rows, accumulation=_SHAPE.micro_batches, learning_rate=3e-3
)


def learnable_examples(job: Job) -> list[Example]:
    """Draw sequences in which each token but one in ten follows from the one before it."""
    shape, generator = job.shape, torch.Generator().manual_seed(SEED)
    count = shape.rows * shape.micro_batches * job.steps
    successor = torch.randperm(_USED_TOKENS, generator=generator)
    rows = torch.randint(_USED_TOKENS, (count, shape.columns), generator=generator)
    follows = torch.rand(rows.shape, generator=generator) >= _NOISE
    for column in range(1, shape.columns):
        next_tokens = successor[rows[:, column - 1]]
        rows[:, column] = next_tokens.where(follows[:, column], rows[:, column])
    prompt = shape.columns // 2
    is_target = torch.arange(shape.columns) >= prompt
    return [Example(row, is_target, prompt, "") for row in rows]


def compare_wires(console: Console) -> None:
    """Train with each wire, and print what it carried and the losses."""
    table = Table(title=f"{_SHAPE}, {_STEPS} steps, LoRA on all linear modules, seed {SEED}")
    table.add_column("wire")
    for heading in (
        "kilobytes\nper step",
        "÷ (4 · tokens ·\nhidden · 2 bytes)",
        "loss of the\nfirst step",
        f"mean of the\nlast {_LAST} steps",
        "− float32",
    ):
        table.add_column(heading, justify="right")
    least = 4 * _SHAPE.tokens * _SHAPE.micro_batches * _SHAPE.hidden * 2
    reference = None
    with _job() as job:
        for wire in get_args(WireType):
            losses, carried = _train_over(wire, job)
            end = mean(losses[-_LAST:])
            reference = end if reference is None else reference
            table.add_row(
                wire,
                f"{carried / 1000:.1f}",
                f"{carried / least:.4f}",
                f"{losses[0]:.4f}",
                f"{end:.4f}",
                f"{end - reference:+.4f}",
            )
        whole = _train_whole(job)
        end, reference = mean(whole[-_LAST:]), reference or 0.0
        difference = f"{end - reference:+.4f}"
        table.add_row("(none)", "", "", f"{whole[0]:.4f}", f"{end:.4f}", difference)
    console.print(table)


@contextmanager
def _job() -> Iterator[Job]:
    with tempfile.TemporaryDirectory() as directory:
        job = Job(Path(directory), _SHAPE, _STEPS, _ADAPTER, _TRAIN, learnable_examples)
        _SHAPE.save(job.directory)
        yield job


def _train_over(wire: WireType, job: Job) -> tuple[list[float], float]:
    """Give the losses of all steps, and the bytes of a step in both directions."""
    cores = sorted(os.sched_getaffinity(0))
    split = SplitSettings(wire_dtype=wire)
    with ExitStack() as stack:
        server = stack.enter_context(Worker(serve, {cores[0]}, job, split))
        client = stack.enter_context(Worker(train_split, {cores[-1]}, job, split))
        client.ask(server.receive())
        losses = [float(client.ask()) for _ in range(_STEPS)]
        account = client.ask()
    return losses, (account["bytes_up"] + account["bytes_down"]) / _STEPS


def _train_whole(job: Job) -> list[float]:
    with Worker(train_whole, os.sched_getaffinity(0), job) as worker:
        worker.receive()
        return [float(worker.ask()) for _ in range(_STEPS)]
