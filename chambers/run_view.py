"""Output of ``chambers train``: a live view or lines of text, and the log of the run."""

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.live import Live

from chambers.run_status import RunState, format_duration, read_run_state, render_status
from federation.messages import MODELS
from federation.run_folder import LOG, METRICS_FILE, Event
from finetuning.errors import printable

_COLOUR = re.compile(rb"\x1b\[\d+m")
# Function that displays the state of a run; None before the run's folder exists.
Show = Callable[[RunState | None], None]


class RunLog:
    """A log file that is moved to the run's folder once that folder exists.

    Output is dropped if the disk is full, so that the run continues. With ``echo``, output is also
    printed. ``path`` is the current file.
    """

    def __init__(self, path: Path, echo: bool = False) -> None:
        self.path = path
        self._echo = echo
        self._lock = threading.Lock()
        self._file = path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, text: bytes) -> None:
        """Append text to the log."""
        with self._lock, suppress(OSError):
            self._file.write(_COLOUR.sub(b"", text))
        if self._echo:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()

    def move_to(self, path: Path) -> None:
        """Move the log to a file, such as the log of a resumed run, and append new output there."""
        with self._lock, suppress(OSError):
            if path == self.path:
                return
            target = path.open("ab", buffering=0)
            with self.path.open("rb") as before:
                shutil.copyfileobj(before, target)
            self._file.close()
            self.path.unlink()
            self.path, self._file = path, target


@contextmanager
def live_view(console: Console | None = None) -> Iterator[Show]:
    """Display the output of ``chambers status``, update it in place, and erase it at the end."""
    started = time.monotonic()
    console = console or Console(markup=False, emoji=False, highlight=False)

    def show(run: RunState | None) -> None:
        passed = format_duration(time.monotonic() - started)
        starting = f"starting Flower and loading the base model ({passed})"
        live.update(starting if run is None else render_status(run), refresh=True)

    with Live(console=console, auto_refresh=False, transient=True) as live:
        show(None)
        yield show


class Lines:
    """Prints a line for each finished training round and evaluation."""

    def __init__(self) -> None:
        self._printed: int | None = None
        print("starting Flower and loading the base model", file=sys.stderr)

    def __call__(self, run: RunState | None) -> None:
        """Print the lines that have been added since the last call."""
        if run is None or not run.events:
            return
        lines = list(run_lines(run.config, run.events))
        if self._printed is None:
            print(f"results and {LOG}: {run.directory}", flush=True)
            # Skip the lines that were printed before the run was resumed.
            self._printed = len(lines) if run.config.get("resume") else 0
        new, self._printed = lines[self._printed :], len(lines)
        if new and run.seconds_left:
            new[-1] += f"; about {format_duration(run.seconds_left)} left"
        for line in new:
            print(line, flush=True)


@contextmanager
def following(link: Path, log: RunLog, show: Show) -> Iterator[None]:
    """Display a run within the context, and move its log to the run's folder.

    The ServerApp creates a link to the run's folder at ``link``.
    """
    ended = threading.Event()

    def show_state() -> None:
        # The ServerApp may be writing to the folder, so the next attempt may succeed.
        with suppress(OSError, ValueError):
            if not link.is_dir():
                show(None)
                return
            directory = link.resolve()
            # Until metrics are written, the run may still be refused, and its folder deleted.
            if (directory / METRICS_FILE).exists():
                log.move_to(directory / LOG)
            show(read_run_state(directory))

    def follow() -> None:
        while not ended.wait(2.0):
            show_state()

    thread = threading.Thread(target=follow, name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show_state()


def run_lines(config: Mapping[str, Any], events: Sequence[Event]) -> Iterator[str]:
    """Yield a line for each finished training round and evaluation.

    Further events only append lines, so lines can be printed while a run continues.
    """
    by_round: dict[int, list[Event]] = {}
    for event in events:
        by_round.setdefault(event.get("round", 0), []).append(event)
    for event in events:
        number = event.get("round", 0)
        name = f"round {number} of {config['rounds']}" if number else "base model"
        own = by_round[number]
        if event["event"] == "refused":
            yield f"{name}: not registered: {_reasons(event)}"
        if event["event"] == "round":
            trained = [e for e in own if e["event"] == "train"]
            # The event of a round is recorded before the events of its participants.
            if {e["client"] for e in trained} >= set(event.get("participants", [])):
                yield _line(f"{name}: trained", event, _trained(trained), _reasons(event))
        if event["event"] == "late":
            yield f"{name}: averaged again with late replies: {', '.join(event['clients'])}"
        if event["event"] == "evaluation":
            missing = [e for e in own if e["event"] == "evaluation-missing"]
            reasons = "".join(map(_reasons, missing[-1:]))
            losses = _evaluated([e for e in own if e["event"] == "evaluate"])
            if losses or reasons:
                from_all = config.get("continual.importance") == "server" and number > 0
                is_last = number == int(config["rounds"])
                has_importance = (
                    config.get("strategy") == "fedjudge-cl" and from_all and not is_last
                )
                what = "evaluated, with importance J," if has_importance else "evaluated"
                yield _line(f"{name}: {what}", event, losses, reasons)


def _line(what: str, event: Event, losses: str, left_out: str) -> str:
    heading = f"{what} in {event.get('seconds', 0):.0f} s"
    return "; ".join(filter(None, (heading, losses, left_out and f"left out: {left_out}")))


def _reasons(event: Event) -> str:
    return ", ".join(
        printable(f"{out['client']} ({out['reason']})", 200) for out in event.get("left_out", [])
    )


def _trained(events: Sequence[Event]) -> str:
    losses = {e["client"]: [e["loss"]] for e in events if e.get("loss") is not None}
    return f"training loss {_listed(losses)}" if losses else ""


def _evaluated(events: Sequence[Event]) -> str:
    known = [e for e in events if e.get("loss") is not None]
    models = [model for model in MODELS if any(e["model"] == model for e in known)]
    by_client: dict[str, dict[str, float]] = {}
    for event in known:
        by_client.setdefault(event["client"], {})[event["model"]] = event["loss"]
    whole = {
        client: [own[model] for model in models]
        for client, own in sorted(by_client.items())
        if own.keys() >= set(models)
    }
    return f"held-out loss ({'/'.join(models)}) {_listed(whole)}" if whole else ""


def _listed(losses: Mapping[str, Sequence[float]]) -> str:
    """Return the losses of one or more models by client, or their means for many clients."""
    if len(losses) <= 4:
        return ", ".join(f"{printable(name)} {_numbers(own)}" for name, own in losses.items())
    means = [fmean(values) for values in zip(*losses.values(), strict=True)]
    return f"{_numbers(means)}, mean of {len(losses)} clients"


def _numbers(values: Sequence[float]) -> str:
    return "/".join(f"{value:.3f}" for value in values)
