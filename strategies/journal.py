"""How a strategy records a run: the journal, which the ServerApp implements; events; status."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Any, Literal, Protocol

from flwr.common import log

from federation.messages import MODELS
from federation.run_folder import LaneStatus, RunStatus
from finetuning.adapters.adapter import State

# Keys whose values readers of events don't expect to be numbers.
_KEYS_OF_EVENTS = {"clients", "participants", "left_out", "withheld"}
# Interval for writing the progress within a round to disk.
_REFRESH_SECONDS = 10.0

What = Literal["update", "update at the server", "data size", "importance"]
_FAR = "is too far above the other clients' median"
_REASONS: dict[What, str] = {
    "update": _FAR,
    "update at the server": _FAR,
    "data size": "exceeds the agreed number of rows (if there is none, a multiple of the other "
    "clients' median), or a client's maximum share (max-share)",
    "importance": "is far above the typical values of all clients",
}


@dataclass(frozen=True)
class Progress:
    """The state of a run between rounds, apart from the global adapter."""

    lineage: str  # name of the run across its resumptions
    finished_rounds: int = 0  # rounds whose adapters have been averaged
    evaluated: bool = False  # whether the current global adapter has been evaluated
    importance: State | None = None  # J at the current global adapter, if it has been computed
    optimizers: State | None = None  # states of the block server's optimizers, if any
    update: State | None = None  # state of ``server.update``, if any


class Journal(Protocol):
    """Records the status, events and adapters of a run."""

    @property
    def scratch(self) -> Path:
        """Folder for temporary files that are deleted when a round ends."""

    def show(self, status: RunStatus) -> None:
        """Replace the status of the run."""

    def record(self, event: Mapping[str, Any]) -> None:
        """Append an event to ``metrics.jsonl``."""

    def keep_personalised(
        self, client: str, state: State | Path | None, round_number: int, size: int
    ) -> None:
        """Save a client's personalised adapter, which is its local adapter after training.

        ``state`` is None if only the client knows it. It may be a safetensors file below
        ``scratch``; this file may be moved. ``size`` is the client's number of training rows.
        """

    def personalised(self, client: str) -> tuple[int, State] | None:
        """Return the round and the weights of the adapter last saved for a client, or None."""

    def checkpoint(self, progress: Progress, state: State) -> None:
        """Save the global adapter after a round, and all state needed to resume the run."""

    def discard(self, round_number: int) -> None:
        """Delete the checkpoint of a round's unusable adapter if an earlier checkpoint exists."""


class LiveStatus:
    """The current status of a run, written to its journal."""

    def __init__(self, journal: Journal, rounds: int) -> None:
        self._journal = journal
        self._status = RunStatus(rounds=rounds)
        self._started = self._shown = 0.0

    def begin(self, status: RunStatus, seconds: float = 0.0) -> None:
        """Start a phase with this status, in which the clients have ``seconds`` to reply."""
        now, self._started = time.time(), time.monotonic()
        changes = {"rounds": self._status.rounds, "since": now, "until": now + seconds}
        self._status = status.model_copy(update=changes)
        self._show()

    def extend(self, seconds: float) -> None:
        """Set the deadline to a number of seconds from now."""
        self._status.until = time.time() + seconds
        self._show()

    def add(self, client: str, reason: str | None) -> None:
        """Record that a client has replied, or the reason why it is left out."""
        if reason is None:
            self._status.replied.append(client)
        else:
            self._status.left_out[client] = reason
            if client in self._status.replied:
                self._status.replied.remove(client)
        self._show()

    def refresh(self, lanes: Callable[[], list[LaneStatus]]) -> None:
        """Write the progress within a round, at most once every ``_REFRESH_SECONDS``."""
        if time.monotonic() - self._shown >= _REFRESH_SECONDS:
            self._status.lanes = lanes()
            self._show()

    @property
    def seconds(self) -> float:
        """Seconds since the start of the phase."""
        return round(time.monotonic() - self._started, 3)

    def _show(self) -> None:
        self._shown = time.monotonic()
        self._journal.show(self._status)


def evaluation_events(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split metrics like ``global.loss`` into one event for each evaluated model."""
    events = []
    for model in MODELS:
        prefix = f"{model}."
        own = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        if own:
            events.append({**{underscored(k): v for k, v in own.items()}, "model": model})
    return events


def underscored(key: str) -> str:
    """Return a key as it is spelled in ``metrics.jsonl``, with underscores.

    A client's metric of the same name as something else that events contain gets another one.
    """
    name = key.replace("-", "_")
    return f"{name}_" if name in _KEYS_OF_EVENTS else name


def record_scaled(
    journal: Journal, server_round: int, what: What, factors: Mapping[str, float]
) -> None:
    """Log and record each client whose contribution was scaled down, by a factor below 1."""
    for name, factor in factors.items():
        if factor < 1:
            log(WARNING, "%s: its %s is scaled by %.2g: it %s", name, what, factor, _REASONS[what])
            event = {"event": "scaled", "round": server_round, "client": name}
            journal.record({**event, "what": what, "factor": factor})


def reasons(left_out: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the clients left out and the reasons, in the format of ``metrics.jsonl``."""
    return [{"client": name, "reason": reason} for name, reason in left_out.items()]
