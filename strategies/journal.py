"""The interface that a strategy uses to record a run; the ServerApp implements it with files."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from federation.messages import State
from federation.run_folder import RunStatus


@dataclass(frozen=True)
class Progress:
    """The state of a run between rounds, apart from the global adapter."""

    lineage: str  # name of the run across its resumptions
    finished_rounds: int = 0  # rounds whose adapters have been averaged
    evaluated: bool = False  # whether the current global adapter has been evaluated
    importance: State | None = None  # J at the current global adapter, if it has been computed
    optimizers: State | None = None  # states of the server's optimizers, if any


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
        self, client: str, state: State | Path, round_number: int, size: int
    ) -> None:
        """Save a client's personalised adapter, which is its local adapter after training.

        ``state`` may be a safetensors file below ``scratch``; this file may be moved. ``size`` is
        the client's number of training rows.
        """

    def personalised(self, client: str) -> tuple[int, State] | None:
        """Return the round and the weights of the adapter last saved for a client, or None."""

    def checkpoint(self, progress: Progress, state: State) -> None:
        """Save the global adapter after a round, and all state needed to resume the run."""

    def discard(self, round_number: int) -> None:
        """Delete the checkpoint of a round's unusable adapter if an earlier checkpoint exists."""
