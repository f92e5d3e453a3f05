"""Bytes on the wire and losses with each ``split.wire-dtype``: ``python -m bench.wires``.

A small random Llama with LoRA on every linear module learns token transitions. It is trained over a
separate lane for each wire type, and as a whole model in one process, each time on the same data
and from the same initial adapter.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import mean
from typing import get_args

import torch

from bench.harness import command, make_table, show
from bench.job import SEED, Job, Shape, as_examples, random_job
from bench.parties import Processes
from finetuning.data.tokenization import Example
from finetuning.settings import AdapterSettings
from split.protocol.frames import WireType
from split.settings import SplitSettings

_SHAPE = Shape(hidden=256, blocks=6, vocabulary=1000, columns=128)
_LAST = 10  # number of last steps whose mean loss is compared
_USED_TOKENS = 50
_NOISE = 0.1
_TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
_ADAPTER = AdapterSettings(rank=8, alpha=32, dropout=0.0, targets=_TARGETS)


def learnable_examples(job: Job) -> list[Example]:
    """Draw sequences where 9 of 10 tokens are determined by the previous token."""
    shape, generator = job.shape, torch.Generator().manual_seed(SEED)
    count = shape.rows * shape.micro_batches * job.steps
    successor = torch.randperm(_USED_TOKENS, generator=generator)
    rows = torch.randint(_USED_TOKENS, (count, shape.columns), generator=generator)
    follows = torch.rand(rows.shape, generator=generator) >= _NOISE
    for column in range(1, shape.columns):
        next_tokens = successor[rows[:, column - 1]]
        rows[:, column] = next_tokens.where(follows[:, column], rows[:, column])
    return as_examples(rows)


def train_over(wire: WireType, job: Job) -> tuple[list[float], float]:
    """Train over a lane; return all steps' losses, and the bytes per step in both directions."""
    cores = sorted(os.sched_getaffinity(0))
    split = SplitSettings(wire_dtype=wire)
    with ExitStack() as stack:
        side = Processes(stack, wire, [job], split, {cores[-1]}, server_cores={cores[0]})
        losses = [side.step() for _ in range(job.steps)]
        (account,), _ = side.accounts()
    return losses, (account["bytes_up"] + account["bytes_down"]) / job.steps


def main() -> None:
    """Train with each wire type, and print the bytes and the losses."""
    parser = command(__doc__)
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    table = make_table(
        *("", "kilobytes per step", "÷ (4 · tokens · hidden · 2 bytes)"),
        *("loss of the first step", f"mean of the last {_LAST} steps", "− float32"),
    )

    def add(name: str, losses: Sequence[float], *carried: str) -> None:
        end = mean(losses[-_LAST:])
        ends.append(end)
        values = (f"{losses[0]:.4f}", f"{end:.4f}", f"{end - ends[0]:+.4f}")
        table.add_row(name, *(carried or ("", "")), *values)

    ends: list[float] = []
    with random_job(
        _SHAPE, steps, examples=learnable_examples, adapter=_ADAPTER, learning_rate=3e-3
    ) as job:
        for wire in get_args(WireType):
            losses, carried = train_over(wire, job)
            add(wire, losses, f"{carried / 1000:.1f}", f"{carried / _SHAPE.step_bytes:.4f}")
        with ExitStack() as stack:
            whole = Processes(stack, "(none)", [job], None, os.sched_getaffinity(0))
            add("(none)", [whole.step() for _ in range(steps)])
    show(f"{_SHAPE}, {steps} steps, LoRA on all linear modules, seed {SEED}", table)


if __name__ == "__main__":
    main()
