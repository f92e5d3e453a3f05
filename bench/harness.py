"""Shared parts of measurements: processes bound to cores, timing in turn, and tables."""

import os
import signal
import time
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, median, stdev
from threading import RLock
from typing import Any, TypeVar

import psutil
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

RATIOS = ("medians", "minima", "CPU s", "pairs")
WARM_UP = 2
ANSWER_SECONDS = 900.0
_WIDTH = 400  # columns of the console; rows are never wrapped
_Result = TypeVar("_Result")
_made: list[Any] = []  # in a worker's process, the object that it has made


class BoundProcess:
    """A process with one torch thread, for a ``with`` statement, which kills it at the end.

    The process makes an object, and calls its methods one after another. It is bound to
    its cores before it starts any thread. Between calls, it uses no processor time.
    """

    def __init__(self, cores: Collection[int], make: Callable[..., Any], *arguments: Any) -> None:
        # The process and its threads inherit these variables.
        os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), initializer=_set_up, initargs=(make, arguments)
        )
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            self._started = self._pool.submit(os.getpid)
        finally:
            os.sched_setaffinity(0, before)

    @property
    def pid(self) -> int:
        """The process id, as soon as the object is made."""
        return self._started.result(ANSWER_SECONDS)

    def submit(self, method: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Call a method of the object, without waiting for its result."""
        return self._pool.submit(_call, method, arguments)

    def ask(self, method: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method of the object; return its result, which may take 15 minutes at most."""
        return self.submit(method, *arguments).result(ANSWER_SECONDS)

    def __enter__(self) -> "BoundProcess":
        return self

    def __exit__(self, *_: object) -> None:
        # Kill the process: it may be waiting for one that has ended, and would not stop on request.
        for process in list((self._pool._processes or {}).values()):
            process.kill()
        self._pool.shutdown()


def _set_up(make: Callable[..., Any], arguments: Sequence[Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent process kills this one
    torch.set_num_threads(1)
    tqdm.set_lock(RLock())  # tqdm's default lock, a semaphore, would outlive a killed process
    _made.append(make(*arguments))


def _call(method: Callable[..., _Result], arguments: Sequence[Any]) -> _Result:
    return method(*_made, *arguments)


class Side:
    """One side of a comparison, with the measured times of its turns.

    CPU time is that of the processes ``pids``. ``summary`` and the ratios exclude the first
    ``warm_up`` turns.
    """

    def __init__(self, name: str, pids: Sequence[int], warm_up: int = WARM_UP) -> None:
        self.name = name
        self.warm_up = warm_up
        self._processes = [psutil.Process(pid) for pid in pids]
        self.seconds: list[float] = []  # wall-clock time of each turn
        self.cpu: list[list[float]] = []  # user and system time of each turn, by process
        self.gpu_bytes: list[int] = []  # peak GPU memory that each turn added
        self.losses: list[float] = []

    def start(self) -> None:
        """Start a turn."""
        wait_for_gpus()
        self._gpu_before = gpu_bytes(peak=False)
        self._before = self._cpu_seconds()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End the turn."""
        wait_for_gpus()
        self.seconds.append(time.perf_counter() - self._started)
        after = self._cpu_seconds()
        self.gpu_bytes.append(gpu_bytes() - self._gpu_before)
        self.cpu.append([b - a for a, b in zip(self._before, after, strict=True)])

    def summary(self) -> tuple[float, float, float]:
        """Return the median and minimum of seconds per turn, and the mean of CPU seconds."""
        seconds, cpu = self.seconds[self.warm_up :], self.cpu[self.warm_up :]
        return median(seconds), min(seconds), mean(map(sum, cpu))

    def _cpu_seconds(self) -> list[float]:
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]


def wait_for_gpus() -> None:
    """Wait until all work queued on this process's GPUs is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(number):  # synchronising would initialise unused GPUs
                torch.cuda.synchronize(number)


def gpu_bytes(peak: bool = True) -> int:
    """Return this process's peak GPU memory or, without ``peak``, reset it and return the use."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0
    numbers = range(torch.cuda.device_count())
    if peak:
        return sum(map(torch.cuda.max_memory_allocated, numbers))
    for number in numbers:
        torch.cuda.reset_peak_memory_stats(number)
    return sum(map(torch.cuda.memory_allocated, numbers))


def compared_with(one: Side, other: Side) -> dict[str, float]:
    """Return one side's time ÷ the other's, by the names in ``RATIOS``.

    For ``pairs``, each turn is divided by the other side's turn of the same number, and the median
    of these ratios is returned. Slow periods of the machine hardly affect it.
    """
    values = [a / b for a, b in zip(one.summary(), other.summary(), strict=True)]
    both = zip(one.seconds[one.warm_up :], other.seconds[other.warm_up :], strict=True)
    return dict(zip(RATIOS, (*values, median(a / b for a, b in both)), strict=True))


def ratios(one: Side, other: Side) -> list[str]:
    """Format one side's time ÷ the other's, in the order of ``RATIOS``."""
    return [f"{value:.3f}" for value in compared_with(one, other).values()]


def format_mean(values: Sequence[float], digits: int) -> str:
    """Format a mean and, if it isn't 0, the standard deviation."""
    deviation = stdev(values) if len(values) > 1 else 0.0
    text = f"{mean(values):.{digits}f}"
    return f"{text} ± {deviation:.{digits}f}" if deviation else text


def command(doc: str | None, pairs: int | None = None) -> ArgumentParser:
    """Return a parser for a measurement's arguments; ``doc`` is the docstring of its module.

    With ``pairs``, there is an argument ``--pairs`` with this default.
    """
    parser = ArgumentParser(description=(doc or "").splitlines()[0])
    if pairs is not None:
        parser.add_argument("--pairs", type=int, default=pairs, help="number of measured turns")
    return parser


def use_one_core() -> set[int]:
    """Bind this process to one core, with one torch thread, and return the core."""
    core = {max(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, core)
    torch.set_num_threads(1)
    return core


def make_table(*headings: str) -> Table:
    """Create a table; columns with a heading are right-aligned, and others left-aligned."""
    table = Table(box=MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table


def show(*parts: Table | str) -> None:
    """Print tables and lines as Markdown, with one line for each row, however long."""
    console = Console(width=_WIDTH, soft_wrap=True, highlight=False, markup=False, emoji=False)
    for part in parts:
        with console.capture() as printed:
            console.print(part)
        # Rich draws a table's edges as empty lines.
        lines = (line.rstrip() for line in printed.get().splitlines() if line.strip())
        print(*lines, sep="\n", end="\n\n", flush=True)
