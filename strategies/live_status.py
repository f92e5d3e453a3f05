"""Update the status of a run while clients work."""

import time
from collections.abc import Callable

from federation.run_folder import LaneStatus, RunStatus
from strategies.journal import Journal

# Interval for writing the progress within a round to disk.
_REFRESH_SECONDS = 10.0


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
