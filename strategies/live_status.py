"""Keeps the status of a run up to date while clients work."""

import time
from collections.abc import Callable, Collection, Mapping

from federation.status import LaneStatus, Phase, RunStatus
from strategies.journal import Journal

# How often the progress within a round is written to the disk.
_REFRESH_SECONDS = 10.0


class LiveStatus:
    """The current status of a run.

    Args:
        journal: Shows the status.
        rounds: Number of rounds of the run.

    """

    def __init__(self, journal: Journal, rounds: int) -> None:
        self._journal = journal
        self._status = RunStatus(rounds=rounds)
        self._started = self._shown = 0.0

    def begin(
        self,
        phase: Phase,
        round_number: int,
        seconds: float = 0.0,
        asked: Collection[str] = (),
        absent: Mapping[str, str] | None = None,
    ) -> None:
        """Show that a phase begins.

        Args:
            phase: Current phase.
            round_number: Number of the round.
            seconds: Time that clients have to reply.
            asked: Clients that work in this phase.
            absent: Reasons why others don't, by client.

        """
        now = time.time()
        self._started = time.monotonic()
        self._status = RunStatus(
            phase=phase,
            round=round_number,
            rounds=self._status.rounds,
            since=now,
            until=now + seconds,
            asked=list(asked),
            left_out=dict(absent or {}),
        )
        self._show()

    def extend(self, seconds: float) -> None:
        """Show that the next clients have some seconds from now."""
        self._status.until = time.time() + seconds
        self._show()

    def add(self, client: str, reason: str | None) -> None:
        """Show that a client has replied, or why it is left out."""
        if reason is None:
            self._status.replied.append(client)
        else:
            self._status.left_out[client] = reason
            if client in self._status.replied:
                self._status.replied.remove(client)
        self._show()

    def refresh(self, lanes: Callable[[], list[LaneStatus]]) -> None:
        """Show the progress within a round, if it was last shown a while ago."""
        if time.monotonic() - self._shown >= _REFRESH_SECONDS:
            self._status.lanes = lanes()
            self._show()

    @property
    def seconds(self) -> float:
        """Seconds since the phase began."""
        return round(time.monotonic() - self._started, 3)

    def _show(self) -> None:
        self._shown = time.monotonic()
        self._journal.show(self._status)
