"""Read the status of a run from the files in its folder, and format it for a terminal."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from chambers.disk_space import ACCESS_LOG, DATABASE, MIN_FREE_GIB, free_gib, top_sender
from chambers.errors import describe_error
from chambers.time_left import time_left
from federation.run_folder import (
    LOG,
    METRICS_FILE,
    WITHDRAWN,
    Event,
    RunStatus,
    checkpoint_files,
    is_running,
    read_events,
    read_status,
)
from finetuning.errors import printable

CLIENT_COLUMNS = ("client", "rows", "tokens/s", "loss", "")


@dataclass(frozen=True)
class RunState:
    """The state of a run, read from its folder."""

    directory: Path
    config: Mapping[str, Any]
    status: RunStatus
    events: Sequence[Event]
    is_running: bool  # whether a process on this machine writes to the folder
    checkpoint: Path | None  # the newest checkpoint; None if there is none
    now: float  # time of reading, in seconds since the epoch
    space: str  # free space in the run's folder and, if specified, for the SuperLink's database
    sender: str  # address that sends the most data to the coordinator; empty if unknown
    withdrawn: str = ""  # which client was withdrawn, and the run to use instead

    @property
    def exit_status(self) -> int:
        """Exit status of ``chambers status``: 0 if the run is active or has completed, else 1."""
        return 0 if self.is_running or self.status.phase == "completed" else 1

    @property
    def seconds_left(self) -> float | None:
        """Estimated remaining time in seconds; None if unknown."""
        if not self.works:
            return None
        return time_left(self.config, self.status, self.events, self.now)

    @property
    def works(self) -> bool:
        """Whether the run is training or evaluating."""
        return self.is_running and self.status.phase in ("training", "evaluation")


def read_run_state(directory: Path, coordinator: Path | None = None) -> RunState:
    """Read a run's folder and, if given, the proxy's log in the coordinator's folder.

    Raise ``OSError`` if a file can't be read, or ``ValueError`` if one is malformed.
    """
    config = json.loads((directory / "config.json").read_bytes())
    if not (isinstance(config, dict) and {"strategy", "rounds"} <= config.keys()):
        raise ValueError("config.json is not from a run")
    # Check for a process before reading the status; else a run that ends now would look killed.
    alive = is_running(directory)
    checkpoints = checkpoint_files(directory)
    disks = [directory, coordinator / DATABASE] if coordinator else [directory]
    return RunState(
        directory=directory,
        config=config,
        status=read_status(directory),
        events=read_events(directory / METRICS_FILE),
        is_running=alive,
        checkpoint=checkpoints[-1] if checkpoints else None,
        now=time.time(),
        space="; ".join(_or_unknown(_space, folder) for folder in disks),
        sender=_or_unknown(top_sender, coordinator / ACCESS_LOG) if coordinator else "",
        withdrawn=_withdrawn(directory / WITHDRAWN),
    )


def _withdrawn(file: Path) -> str:
    if not file.exists():
        return ""
    found = json.loads(file.read_bytes())
    return f"{found['client']}: use {found['successor']} instead"


def _space(folder: Path) -> str:
    free = free_gib(folder)
    return f"{'LOW: ' if free < MIN_FREE_GIB else ''}{free:.1f} GiB free in {folder}"


def _or_unknown(describe: Callable[[Path], str], path: Path) -> str:
    try:
        return describe(path)
    except OSError as error:
        return f"unknown: {describe_error(error)}"


def render_status(run: RunState) -> RenderableType:
    """Render the status as lines of text, followed by a table of the clients."""
    lines = Table.grid(padding=(0, 2))
    for heading, text in list_facts(run):
        lines.add_row(heading, printable(text))
    table = Table(*CLIENT_COLUMNS, box=None, padding=(0, 2, 0, 0))
    for row in list_clients(run):
        table.add_row(*map(printable, row))
    return Group(lines, "", table) if table.row_count else lines


def list_facts(run: RunState) -> list[tuple[str, str]]:
    """Return the headings and texts of the status."""
    return [
        ("Run", f"{run.directory} ({run.config['strategy']})"),
        ("State", _state(run)),
        ("Time left", _time_left(run)),
        ("Evaluation", _evaluation(run)),
        ("Factors", _factor_error(run)),
        ("Checkpoint", _checkpoint(run)),
        ("Disk", run.space),
        *([("Log", str(run.directory / LOG))] if (run.directory / LOG).exists() else []),
        *([("Proxy", run.sender)] if run.sender else []),
        *([("Withdrawn", run.withdrawn)] if run.withdrawn else []),
    ]


def _state(run: RunState) -> str:
    status = run.status
    if not run.is_running:
        ago = f"{format_duration(run.now - status.updated)} ago"
        if status.phase == "completed":
            return f"completed {ago}"
        if status.phase == "failed":
            return f"failed {ago}: {status.problem}"
        resume = f'; continue with resume = "{run.directory}"' if run.checkpoint else ""
        return f"not running: its process was killed before the run ended{resume}"
    if not run.works:
        return "running: loading the base model, or waiting for SuperNodes to register"
    doing = f"running: {status.phase} of round {status.round} of {run.config['rounds']}"
    since = f"for {format_duration(run.now - status.since)}"
    answered = f"{len(status.replied)} of {len(status.asked)} clients have replied"
    limit = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.until))
    return f"{doing}, {since}; {answered}; replies are due by {limit}"


def _time_left(run: RunState) -> str:
    if run.seconds_left is not None:
        return f"about {format_duration(run.seconds_left)}"
    if run.works:
        return "unknown until the first round is over"
    return "unknown" if run.is_running else "-"


def _evaluation(run: RunState) -> str:
    """Return each model's mean held-out loss in the last evaluation, and the base model's."""
    known = [e for e in run.events if e["event"] == "evaluate" and e.get("loss") is not None]
    if not known:
        return "none yet"
    last = max(event["round"] for event in known)
    losses: dict[str, dict[str, float]] = {}
    for event in known:
        if event["round"] == last or event["model"] == "base":
            losses.setdefault(event["model"], {})[event["client"]] = event["loss"]
    means = ", ".join(f"{model} {fmean(own.values()):.3f}" for model, own in losses.items())
    return f"after round {last}: mean held-out loss {means}"


def _factor_error(run: RunState) -> str:
    """Return the last error of averaging LoRA's factors instead of their products."""
    errors = [event for event in run.events if event["event"] == "factors"]
    if errors:
        error = f"{100 * errors[-1]['error']:.1f} %"
        return f"averaging A and B apart had an error of {error} in round {errors[-1]['round']}"
    if run.config.get("adapter.trained", "both") != "both":
        return "the average of adapters is exact, as only A or B is trained in a round"
    masked = run.config.get("sums.enabled")
    return "error of averaging A and B apart: " + ("hidden by masks" if masked else "unknown")


def _checkpoint(run: RunState) -> str:
    if run.checkpoint is None:
        return "none yet"
    age = format_duration(run.now - run.checkpoint.stat().st_mtime)
    return f"after round {int(run.checkpoint.stem.rpartition('-')[2])}, {age} ago"


def list_clients(run: RunState) -> list[tuple[str, ...]]:
    """Return each client's name, its last training results, and its state."""
    status, doing = run.status, dict[str, str]()
    reduced = set[str]()  # clients left out of the last round, or whose update was scaled
    last: dict[str, Event] = {}
    for event in run.events:
        if event["event"] == "train":
            last[event["client"]] = event
        if event["event"] == "scaled" and event["client"] in doing:
            doing[event["client"]] += f"; its {event['what']} was scaled by {event['factor']:.2g}"
            reduced.add(event["client"])
        # Skip other events: they contain metrics whose keys are chosen by the clients.
        if event["event"] not in {"round", "late", "refused"}:
            continue
        for name in event.get("participants", []):
            late = " (late)" if name in event.get("clients", []) else ""
            doing[name] = f"took part in round {event['round']}{late}"
            reduced.discard(name)
        for out in event.get("left_out", []):
            doing[out["client"]] = f"OUT of round {event['round']}: {out['reason']}"
            reduced.add(out["client"])
    if run.works:
        before = {name: f"; {doing[name]}" for name in reduced}
        lanes = {each.client: f", {each.steps} of {each.planned} steps" for each in status.lanes}
        for name in status.asked:
            doing[name] = f"in {status.phase}{lanes.get(name, '')}{before.get(name, '')}"
        for name in status.replied:
            doing[name] = "has replied" + before.get(name, "")
        for name, reason in status.left_out.items():
            doing[name] = f"OUT of round {status.round}: {reason}"
    rows: list[tuple[str, ...]] = []
    for name, text in sorted(doing.items()):
        own = last.get(name, {})
        count = "-" if "examples" not in own else f"{own['examples']:,}"
        known = own.get("seconds") and "tokens" in own
        speed = f"{own['tokens'] / own['seconds']:,.0f}" if known else "-"
        loss = "-" if own.get("loss") is None else f"{own['loss']:.3f}"
        rows.append((name, count, speed, loss, text))
    return rows


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
