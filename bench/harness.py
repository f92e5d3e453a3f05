"""Common parts of measurements: processes bound to cores, timing in turn, and tables."""

import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import mean, median
from typing import Any

import psutil
import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

RATIOS = ("medians", "minima", "CPU s", "pairs")
WARM_UP = 2
_ANSWER_SECONDS = 900.0
_STOP_SECONDS = 10.0
_WIDTH = 400  # of a row, which is never wrapped
_SPAWN = get_context("spawn")


class Worker:
    """A process with one torch thread that answers messages; used in a ``with`` statement.

    It runs ``role`` with its end of the pipe and the arguments, which must be picklable. It is
    bound to its cores before it starts any thread. While it waits, it uses no processor time.
    """

    def __init__(self, role: Callable[..., None], cores: Collection[int], *arguments: Any) -> None:
        self._link, other = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_enter, args=(role, other, arguments), daemon=True)
        # Inherited by the process and its threads.
        os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            self._process.start()
        finally:
            os.sched_setaffinity(0, before)
        other.close()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def receive(self) -> Any:
        """Wait for the next message of the process.

        Raises:
            SystemExit: The process failed, or sent nothing for 15 minutes.

        """
        if not self._link.poll(_ANSWER_SECONDS):
            raise SystemExit(f"process {self.pid} sent nothing for {_ANSWER_SECONDS:g} s")
        try:
            message = self._link.recv()
        except EOFError:
            raise SystemExit(f"process {self.pid} ended unexpectedly") from None
        if isinstance(message, SystemExit):
            raise message
        return message

    def send(self, message: Any) -> None:
        """Send a message without waiting for its answer."""
        self._link.send(message)

    def ask(self, message: Any = None) -> Any:
        """Send a message and wait for its answer."""
        self.send(message)
        return self.receive()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._link.close()  # the process then ends when it waits for a message
        if kind is None:
            self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _enter(role: Callable[..., None], link: Connection, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process ends this one
    torch.set_num_threads(1)
    try:
        role(link, *arguments)
    except (EOFError, BrokenPipeError):
        pass  # the parent has closed the pipe
    except Exception as error:
        link.send(SystemExit(f"{role.__name__}: {type(error).__name__}: {error}"))
        raise


def ask_all(workers: Sequence[Worker], messages: Sequence[Any]) -> list[Any]:
    """Send one message to each process, then wait for all answers."""
    for worker, message in zip(workers, messages, strict=True):
        worker.send(message)
    return [worker.receive() for worker in workers]


class Side:
    """One side of a comparison, with the measured times of its turns.

    CPU time is the time of the processes ``pids``. ``summary`` and ``ratios`` exclude the first
    ``warm_up`` turns.
    """

    def __init__(self, name: str, pids: Sequence[int], warm_up: int = WARM_UP) -> None:
        self.name = name
        self.warm_up = warm_up
        self._processes = [psutil.Process(pid) for pid in pids]
        self.seconds: list[float] = []  # wall-clock time of each turn
        self.cpu: list[list[float]] = []  # user and system time of each turn, by process
        self.losses: list[float] = []

    def start(self) -> None:
        """Start a turn."""
        self._before = self._cpu_seconds()
        self._started = time.perf_counter()

    def stop(self) -> None:
        """End the turn."""
        self.seconds.append(time.perf_counter() - self._started)
        after = self._cpu_seconds()
        self.cpu.append([b - a for a, b in zip(self._before, after, strict=True)])

    def summary(self) -> tuple[float, float, float]:
        """Return the median and minimum of seconds per turn, and the mean of CPU seconds."""
        seconds, cpu = self.seconds[self.warm_up :], self.cpu[self.warm_up :]
        return median(seconds), min(seconds), mean(map(sum, cpu))

    def _cpu_seconds(self) -> list[float]:
        times = [process.cpu_times() for process in self._processes]
        return [each.user + each.system for each in times]


def compared_with(one: Side, other: Side) -> dict[str, float]:
    """Return one side's time ÷ the other's, by the names in ``RATIOS``.

    The last ratio is the median of the ratios within a round of turns, which is hardly affected
    by slower periods of the machine.
    """
    values = [a / b for a, b in zip(one.summary(), other.summary(), strict=True)]
    both = zip(one.seconds[one.warm_up :], other.seconds[other.warm_up :], strict=True)
    return dict(zip(RATIOS, (*values, median(a / b for a, b in both)), strict=True))


def ratios(one: Side, other: Side) -> list[str]:
    """Format one side's time ÷ the other's, in the order of ``RATIOS``."""
    return [f"{value:.3f}" for value in compared_with(one, other).values()]


def make_table(title: str, *headings: str) -> Table:
    """Create a table; columns are right-aligned, and left-aligned if they have no heading."""
    table = Table(title=title, box=MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    return table


def show(*parts: Table | str) -> None:
    """Print tables and lines as Markdown, which ``bench.pages`` copies to the documentation."""
    for part in parts:
        print(f"{_markdown(part) if isinstance(part, Table) else part}\n", flush=True)


def _markdown(table: Table) -> str:
    """Return a table as Markdown, with its title if any, and one line per row of any length."""
    title, table.title = table.title, None
    console = Console(width=_WIDTH, soft_wrap=True, highlight=False, markup=False)
    with console.capture() as printed:
        console.print(table)
    # Rich draws edges as empty lines, and repeats the line below the headings between sections.
    lines = [line.rstrip() for line in printed.get().splitlines() if line.strip()]
    headings, below, *rows = lines
    above = [f"{title}\n"] if title else []
    return "\n".join([*above, headings, below, *(row for row in rows if row != below)])
