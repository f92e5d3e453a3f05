"""Speed of the middle blocks in 1, 2 and more stages, compared with those in one process.

    python -m bench.stages [--stages 1 2] [--pairs 15]

Each side computes the forward and backward passes of a step's eight micro-batches, four at once,
and takes the optimizer's step; sides take turns. Each stage is a process with one torch thread,
bound to a core of its own as far as there are enough. The coordinator may use all cores.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from bench.harness import RATIOS, WARM_UP, BoundProcess, Side, command, make_table, ratios, show
from bench.job import FLOAT32, SEED, Shape, TrainingJob, random_job
from split.model.adapters import take_apart
from split.model.part import Activations
from split.model.partition import partition_of
from split.protocol.frames import Padding
from split.server.body import load_body
from split.server.body_adapters import BodyAdapters
from split.settings import SplitSettings

_KEY = "openssl req -x509 -newkey rsa:3072 -nodes -days 2 -subj /CN=stage -keyout {0} -out {0}"


class Blocks:
    """The body in a process of its own, or at stages, with an adapter that it trains."""

    def __init__(self, job: TrainingJob, split: SplitSettings) -> None:
        model = FLOAT32.model_copy(update={"name": str(job.directory)})
        state = take_apart(job.state(), partition_of(job.directory, split))["body"]
        self._body = load_body(job.directory, model, split)
        self._adapters = BodyAdapters(self._body, job.adapter, job.settings, state)
        self._shape, self._window, self._steps = job.shape, split.window, 0
        size = (job.shape.rows, job.shape.columns, job.shape.hidden)
        generator = torch.Generator().manual_seed(SEED)
        draw = [torch.randn(size, generator=generator) for _ in range(2 * job.shape.micro_batches)]
        self._hidden, self._gradients = draw[::2], draw[1::2]

    def step(self) -> float:
        """Take an optimizer's step; return the norm of the gradients."""
        padding = Padding("right", torch.full((self._shape.rows,), self._shape.columns))

        def start(index: int) -> Future[Activations]:
            return self._adapters.run_blocks(self._hidden[index], padding, SEED + index, True)

        passes, ends = [start(index) for index in range(self._window)], []
        for index, gradient in enumerate(self._gradients):
            ends.append(self._adapters.propagate_back(passes[index].result(), gradient))
            if len(passes) < len(self._hidden):
                passes.append(start(len(passes)))
        for end in ends:
            end.result()
        _, norm = self._adapters.clip(0.0)
        self._adapters.step(self._steps, 1000)
        self._steps += 1
        return norm


class BlocksSide(Side):
    """One side of the comparison; ``pids`` are those of its stages."""

    def __init__(self, name: str, process: BoundProcess, pids: Sequence[int]) -> None:
        super().__init__(name, [process.pid, *pids])
        self._process = process

    def turn(self) -> None:
        """Measure a step."""
        self.start()
        self.losses.append(self._process.ask(Blocks.step))
        self.stop()


@contextmanager
def stage(key: Path, core: int) -> Iterator[tuple[str, int]]:
    """Start a stage bound to a core; yield its address and process id."""
    arguments = ["-m", "chambers", "stage", "--listen", "127.0.0.1:0", "--key", str(key)]
    with subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stderr is not None
            lines = (re.search(r"waiting .* at (\S+)", line) for line in process.stderr)
            yield next(found[1] for found in lines if found), process.pid
        finally:
            process.kill()


def start_sides(stack: ExitStack, job: TrainingJob, counts: Sequence[int]) -> "list[BlocksSide]":
    """Start a side for each number of stages, after that of a single process."""
    cores = sorted(os.sched_getaffinity(0))
    key = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "stage.pem"
    subprocess.run(_KEY.format(key).split(), check=True, capture_output=True)
    sides = []
    for count in (0, *counts):
        each = (stage(key, cores[number % len(cores)]) for number in range(count))
        hosts = [stack.enter_context(stage) for stage in each]
        addresses = ",".join(address for address, _ in hosts)
        split = SplitSettings(body_hosts=addresses, body_key=str(key) if hosts else "")
        own = set(cores) if count else {cores[0]}
        process = stack.enter_context(BoundProcess(own, Blocks, job, split))
        name = f"{count} stage{'s' * (count > 1)}" if count else "one process"
        sides.append(BlocksSide(name, process, [pid for _, pid in hosts]))
    return sides


def main() -> None:
    """Measure, and print the table."""
    parser = command(__doc__, pairs=15)
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    shape = Shape(micro_batches=8)
    with ExitStack() as stack:
        job = stack.enter_context(random_job(shape, WARM_UP + arguments.pairs))
        sides = start_sides(stack, job, arguments.stages)
        for _ in range(WARM_UP + arguments.pairs):
            for side in sides:
                side.turn()
    table = make_table("", "s per step", "tokens/s", "÷", *RATIOS)
    for number, side in enumerate(sides):
        seconds, _, _ = side.summary()
        cells = [f"{seconds:.3f}", f"{shape.tokens * shape.micro_batches / seconds:.0f}"]
        base = sides[number - 1] if number else side
        table.add_row(side.name, *cells, *([base.name, *ratios(side, base)] if number else []))
    show(f"{shape}, {arguments.pairs} turns, seed {SEED}", table)
    if any(side.losses != sides[0].losses for side in sides):
        raise SystemExit("the gradients of stages differ from those of one process")


if __name__ == "__main__":
    main()
