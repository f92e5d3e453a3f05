"""The folder of a run: its events and status, whether it is active, and if it can be resumed."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import platformdirs
from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from federation.run_config import ConfigError, RunConfig
from finetuning.errors import printable
from finetuning.files import write_file
from finetuning.settings import names_modules

METRICS_FILE = "metrics.jsonl"
STATUS = "status.json"
SUMMARY = "summary.txt"
LOG = "log.txt"
CHECKPOINTS = "checkpoints"
WITHDRAWN = "withdrawn.json"  # names the run that replaces this one
# Environment variable with the path at which a ServerApp creates a link to the run's folder.
LINK = "CHAMBERS_RUN_LINK"
_LOCK = "running.lock"
# Seconds to wait for the lock, which ``is_running`` also acquires briefly.
_LOCK_SECONDS = 2.0

# Keys, besides ``evaluate.*`` and ``*-timeout``, that may change when a run is resumed: they don't
# affect training. (A different device rounds differently and draws different dropout masks, but a
# run may move to another machine. Time limits, like network failures, only affect which clients
# take part.)
_MAY_CHANGE = {
    "min-nodes",
    "late-replies",
    "output-dir",
    "state-path",
    "resume",
    "instruction-key",
    "data.path",
    "model.devices",
    "sums.members",
    "train.checkpoint-minutes",
    "exclude",
    "keep-rounds",
    "report-to",
    "split.window",
    "split.body-devices",
    "split.body-hosts",
    "split.body-key",
    "split.listen",
    "split.advertise",
    "split.key-exchange",
    "split.rotate-keys-every",
}

Event = dict[str, Any]  # one line of metrics.jsonl
Phase = Literal["registration", "training", "evaluation", "completed", "failed"]

# Required keys by type of event; other types of events have no required keys.
_NEEDS = {
    "train": {"client", "round"},
    "evaluate": {"client", "round", "model"},
    "answers": {"client", "round", "model", "answers"},
    "round": {"round"},
    "late": {"round", "clients"},
    "scaled": {"client", "round", "what", "factor"},
    "evaluation-missing": {"round", "left_out"},
    "lane": {"client", "round", "purpose"},
    "factors": {"round", "error"},
    "audit": {"client", "line", "digest"},
    "release": {"client", "verdict", "leaks"},
}


class LaneStatus(BaseModel):
    """A client's progress in a round of split learning."""

    client: str
    steps: int  # number of completed optimizer steps
    planned: int  # number of optimizer steps in the client's round
    tokens: int  # number of padded tokens processed by forward passes


class RunStatus(BaseModel):
    """The status of a run. Times are Unix times in seconds; clients are identified by name."""

    phase: Phase = "registration"
    round: int = 0  # counted from 1; 0 before the first round
    rounds: int = 0
    since: float = 0.0  # time at which the phase began
    until: float = 0.0  # deadline after which clients that haven't replied are left out
    updated: float = 0.0  # time when this status was written
    asked: list[str] = []  # clients to which a message was sent in this phase
    replied: list[str] = []  # clients that sent a valid reply
    left_out: dict[str, str] = {}  # reasons for leaving out clients in this phase
    lanes: list[LaneStatus] = []  # progress of the clients with open lanes
    problem: str = ""  # reason why the run failed


def results_folder(output_dir: str) -> Path:
    """Return the folder of all runs: ``output-dir``, or ``runs`` in the user's data folder."""
    if output_dir:
        return Path(output_dir).expanduser()
    return platformdirs.user_data_path("chambers") / "runs"


def announce(directory: Path) -> None:
    """Create a link to a run's folder at the path in the environment variable ``LINK``, if set.

    Raise ``OSError`` if the link can't be created.
    """
    if link := os.environ.get(LINK):
        Path(link).unlink(missing_ok=True)
        Path(link).symlink_to(directory.absolute())


class RunningError(RuntimeError):
    """Another process is writing to the run's folder."""


@contextmanager
def running(directory: Path) -> Iterator[None]:
    """Lock a run's folder within the context; the lock is also released if the process dies.

    Raise ``RunningError`` if another process holds the lock.
    """
    # Any user who can read the lock file could acquire the lock.
    lock = FileLock(directory / _LOCK, timeout=_LOCK_SECONDS, mode=0o600)
    try:
        acquired = lock.acquire()
    except Timeout as error:
        raise RunningError(f"another run is writing to {directory}; wait until it ends") from error
    with acquired:
        yield


def is_running(directory: Path) -> bool:
    """Return whether a process on this machine holds the lock of a run's folder.

    Raise ``OSError`` if the lock file can't be opened.
    """
    if not (directory / _LOCK).exists():
        return False
    try:
        with FileLock(directory / _LOCK, timeout=0, mode=0o600):
            return False
    except Timeout:
        return True


def read_status(directory: Path) -> RunStatus:
    """Read ``status.json``; if it doesn't exist yet, return the status of a run that is starting.

    Raise ``ValueError`` if the file is malformed.
    """
    try:
        return RunStatus.model_validate_json((directory / STATUS).read_bytes())
    except FileNotFoundError:
        return RunStatus()
    except ValidationError as error:
        raise ValueError(f"{STATUS} is damaged") from error


def end_status(directory: Path, problem: str = "") -> None:
    """Write the final status: ``failed`` if there is a problem, else ``completed``."""
    changes = {"phase": "failed" if problem else "completed", "problem": printable(problem)}
    write_status(directory, read_status(directory).model_copy(update=changes | {"lanes": []}))


def write_status(directory: Path, status: RunStatus) -> None:
    """Replace ``status.json`` atomically, so that readers never see a partial file."""
    current = status.model_copy(update={"updated": time.time()})
    write_file(directory / STATUS, current.model_dump_json(indent=1) + "\n")


def read_events(path: Path) -> list[Event]:
    """Read ``metrics.jsonl``; return no events if the file doesn't exist.

    An incomplete last line, which a killed run may leave behind, is ignored. If any other line is
    malformed, raise ``ValueError`` with the name of the file and the number of the line.
    """
    if not path.exists():
        return []
    *lines, unfinished = path.read_bytes().split(b"\n")
    events = [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    with suppress(ValueError):
        events.append(_parse(unfinished, "the last line"))
    return events


def _parse(line: bytes, where: str) -> Event:
    try:
        event: Event = json.loads(line)
        missing = sorted(_NEEDS.get(event["event"], set()) - event.keys())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a JSON object with an 'event'") from error
    if missing:
        raise ValueError(f"{where}: the {event['event']} event lacks {', '.join(missing)}")
    return event


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first."""
    files = (directory / CHECKPOINTS).glob("round-*.safetensors")
    numbers = {file: file.stem.removeprefix("round-") for file in files}
    # Not "round-0002 (copy)". Sort by number: as text, round-10000 would come before round-9999.
    found = [file for file, number in numbers.items() if number.isdecimal()]
    return sorted(found, key=lambda file: int(numbers[file]))


def check_resumable(directory: Path, config: RunConfig) -> None:
    """Raise ``ConfigError`` unless a run has a checkpoint, and only permitted keys have changed.

    A key that didn't exist when the run began is treated as if it had its default value.
    """
    if not directory.is_dir():
        raise ConfigError(f'resume = "{directory}" is not a folder')
    if not checkpoint_files(directory):
        raise ConfigError(f'resume = "{directory}" has no checkpoint; start a new run')
    try:
        original = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        before = RunConfig().flat() | original
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'resume = "{directory}": config.json can\'t be read: {error}') from error
    may_change = set(_MAY_CHANGE)
    if config.train.schedule == "constant" and config.train.warmup_ratio == 0:
        may_change.add("rounds")  # other schedules depend on the number of rounds
    if config.split.schedule != "client-batch":
        # With ``client-batch``, the budget splits the clients' stacked batches into passes with
        # separate dropout masks, and the share cap scales gradients.
        may_change |= {"split.activation-budget", "split.share-cap"}
    if not all(map(names_modules, (config.adapter.targets, before["adapter.targets"]))):
        may_change.add("adapter.targets")  # compared after the names have been found
    changed = [
        f"{key} was {before[key]!r} and is {value!r}"
        for key, value in config.flat().items()
        if before[key] != value
        and not (key in may_change or key.startswith("evaluate.") or key.endswith("-timeout"))
    ]
    if changed:
        raise ConfigError(
            f'resume = "{directory}": a run must be resumed with its original config:\n  '
            + "\n  ".join(changed)
        )
