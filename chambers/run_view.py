"""Output of ``chambers train``: a live view on a terminal, otherwise lines of text."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.live import Live

from chambers.run_lines import run_lines
from chambers.run_log import RunLog
from chambers.run_status import Seen, duration, look, render
from federation.run_folder import LOG, METRICS

# Function that displays the state of a run; None before the run's folder exists.
Show = Callable[[Seen | None], None]


@contextmanager
def live_view(console: Console | None = None) -> Iterator[Show]:
    """Display the output of ``chambers status``, update it in place, and erase it at the end."""
    started = time.monotonic()
    console = console or Console(markup=False, emoji=False, highlight=False)

    def show(seen: Seen | None) -> None:
        passed = duration(time.monotonic() - started)
        starting = f"starting Flower and loading the base model ({passed})"
        live.update(starting if seen is None else render(seen), refresh=True)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        show(None)
        yield show


class Lines:
    """Prints a line for each finished training round and evaluation."""

    def __init__(self) -> None:
        self._printed: int | None = None
        print("starting Flower and loading the base model", file=sys.stderr)

    def __call__(self, seen: Seen | None) -> None:
        """Print the lines that have been added since the last call."""
        if seen is None or not seen.events:
            return
        lines = list(run_lines(seen.config, seen.events))
        if self._printed is None:
            print(f"results and {LOG}: {seen.directory}", flush=True)
            # Skip the lines that were printed before the run was resumed.
            self._printed = len(lines) if seen.config.get("resume") else 0
        new, self._printed = lines[self._printed :], len(lines)
        if new and seen.seconds_left:
            new[-1] += f"; about {duration(seen.seconds_left)} left"
        for line in new:
            print(line, flush=True)


@contextmanager
def following(link: Path, log: RunLog, show: Show) -> Iterator[None]:
    """Display a run within the context, and move its log to the run's folder.

    The ServerApp creates a link to the run's folder at ``link``.
    """
    ended = threading.Event()

    def look_once() -> None:
        # The ServerApp may be writing to the folder, so the next attempt may succeed.
        with suppress(OSError, ValueError):
            if not link.is_dir():
                show(None)
                return
            directory = link.resolve()
            # Until metrics are written, the run may still be refused, and its folder deleted.
            if (directory / METRICS).exists():
                log.move_to(directory / LOG)
            show(look(directory))

    def follow() -> None:
        while not ended.wait(2.0):
            look_once()

    thread = threading.Thread(target=follow, name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look_once()
