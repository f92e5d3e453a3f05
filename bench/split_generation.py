"""What splitting costs while text is generated, against the whole model in one process.

    python -m bench.split_generation [--pairs 5] [--wire float32]

Every process, server, client, whole model and proxy, is bound to one and the same core and has one
torch thread. A batch of prompts of equal length is answered greedily and to the full length, with
caches of keys and values everywhere, in turn by the whole model, over a lane, and over a lane with
20 ms each way at 1 Gbit/s. CPU seconds are user and system time of all processes together. With
float32 on the wire the run fails if a token differs.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import get_args

import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench.proxy import proxying
from bench.split_job import (
    LIFETIME,
    SEED,
    Job,
    Shape,
    load_body,
    load_ends,
    load_whole,
    random_examples,
)
from bench.split_processes import Worker
from finetuning.evaluation.generation import Answering
from finetuning.model.whole_model import WholeModel
from finetuning.settings import AdapterSettings, SplitSettings, TrainSettings
from split.client.split_model import SplitModel
from split.lane.dialling import open_lane
from split.model.adapters import take_apart
from split.model.cut import PartyName
from split.model.part import Part
from split.protocol.frames import Limits, WireType
from split.protocol.invitation import Invitation
from split.server.block_server import BlockServer

ROWS, PROMPT, NEW = 8, 64, 64
_ADAPTER = AdapterSettings(rank=4, alpha=16, dropout=0.0, targets="q_proj,k_proj,v_proj")
_DELAY, _GIGABITS = 0.02, 1.0
_LANES = ("near", "far")


def serve_texts(link: Connection, job: Job, split: SplitSettings) -> None:
    """Serve the body to two lanes; give their invitations, and stop when the link closes."""
    body = load_body(job, split)
    state = take_apart(job.state(), body.cut)
    server = BlockServer(
        body=body,
        state=state,
        split=split,
        adapter=job.adapter,
        train=job.train,
        run="bench",
        rounds=1,
        longest=ROWS * PROMPT,
        minimum=1,
        most_kept=ROWS * (PROMPT + NEW),
    )
    try:
        models = {"global": state["body"]}
        link.send([server.invite_to_evaluate(name, 0, models, LIFETIME) for name in _LANES])
        link.recv()
    finally:
        server.stop()


@contextmanager
def lane_to(
    invitation: Invitation, ends: dict[PartyName, Part], split: SplitSettings
) -> Iterator[SplitModel]:
    """Open a lane, and choose the model with the adapter that the ends have."""
    limits = Limits(ends["head"].hidden_size, split.wire_dtype, ROWS * PROMPT, window=1)
    lane = open_lane(invitation, limits, time.monotonic() + LIFETIME, split.resume_timeout)
    try:
        model = SplitModel(ends["head"], ends["tail"], lane, split.frame_timeout)
        model.choose("global", {n: p.detach().clone() for n, p in model.parameters.items()})
        yield model
    finally:
        lane.close()


def measure(
    sides: dict[str, Answering],
    processes: Sequence[psutil.Process],
    pairs: int,
    vocabulary: int,
    exact: bool,
) -> Table:
    """Let the sides answer in turn; the first is what the others are compared with.

    Raises:
        SystemExit: a side's tokens are not the first one's, and should be.

    """
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, vocabulary, (ROWS, PROMPT), generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(pairs + 1):
        texts = []
        for name, model in sides.items():
            started, used = time.perf_counter(), _processor_seconds(processes)
            texts.append(
                model.generate(
                    tokens,
                    torch.ones_like(tokens),
                    NEW,
                    do_sample=False,
                    min_new_tokens=NEW,
                    use_cache=True,
                    pad_token_id=0,
                )
            )
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - started)
                processor[name].append(_processor_seconds(processes) - used)
            if exact and not torch.equal(texts[0], texts[-1]):
                raise SystemExit(f"{name} generated other tokens than {next(iter(sides))}")
    table = Table(
        "", "tokens/s", "ms per token of all rows", "ratio of CPU", "of medians", "of minima"
    )
    base, used = next(iter(seconds.values())), sum(next(iter(processor.values())))
    for name, each in seconds.items():
        table.add_row(
            name,
            f"{ROWS * NEW / median(each):.0f}",
            f"{1000 * median(each) / NEW:.1f}",
            f"{sum(processor[name]) / used:.2f}",
            f"{median(each) / median(base):.2f}",
            f"{min(each) / min(base):.2f}",
        )
    return table


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="times that each side answers")
    parser.add_argument("--wire", choices=get_args(WireType), default="float32")
    arguments = parser.parse_args()
    core = {max(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    torch.set_num_threads(1)
    shape = Shape(columns=PROMPT + NEW)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        shape.save(Path(place))
        job = Job(Path(place), shape, 1, _ADAPTER, TrainSettings(), random_examples)
        split = SplitSettings(wire_dtype=arguments.wire)
        server = stack.enter_context(Worker(serve_texts, core, job, split))
        near, far = server.receive()
        line = stack.enter_context(proxying(far.address, _DELAY, _GIGABITS))
        ends = load_ends(job, split)
        sides: dict[str, Answering] = {
            "whole model": WholeModel(load_whole(job)),
            "split": stack.enter_context(lane_to(near, ends, split)),
            "split, 20 ms each way": stack.enter_context(
                lane_to(replace(far, address=line[0]), ends, split)
            ),
        }
        processes = [psutil.Process(pid) for pid in (os.getpid(), server.pid, line[1])]
        exact = arguments.wire == "float32"
        table = measure(sides, processes, arguments.pairs, shape.vocabulary, exact)
    console = Console()
    console.print(
        f"{ROWS} prompts of {PROMPT} tokens, {NEW} new ones each; Llama with hidden size "
        f"{shape.hidden} and {shape.blocks} blocks, of which the first and last are at the client; "
        f"{arguments.wire} on the wire"
    )
    console.print(table)


if __name__ == "__main__":
    main()
