"""Limits on the time that clients wait for slow clients in a round."""

import math
import time
from collections.abc import Iterable

from split.server.session import Session


class WaitBudget:
    """Time that clients have waited for each other. Not thread-safe.

    Each second of waiting is divided equally among the clients that are waited for. When the total
    reaches half of the round's time, the lane of the client with the most seconds is ended, and its
    seconds are subtracted. A single client can therefore delay a round by at most half of the
    round's time, even if its frames arrive within the other limits. In a round that takes less
    than half of its time, no lane is ended.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._seconds: dict[str, float] = {}
        self._awaited: dict[str, float] = {}  # since when others have waited for each client
        self._noted = 0.0  # time of the last call of ``note``

    def add(self, session: Session) -> None:
        """Add a client that has joined."""
        client = session.account.client
        self._sessions[client], self._seconds[client] = session, 0.0

    def remove(self, client: str) -> None:
        """Remove a client that has left, and its seconds."""
        self.note([each for each in self._awaited if each != client])
        self._sessions.pop(client, None)
        self._seconds.pop(client, None)

    def note(self, awaited: Iterable[str]) -> None:
        """Set the clients that others now wait for; end a lane if the total reaches the limit."""
        now = time.monotonic()
        for client in self._awaited:
            self._seconds[client] += (now - self._noted) / len(self._awaited)
        self._awaited = {client: self._awaited.get(client, now) for client in awaited}
        self._noted = now
        max_seconds = min((each.lifetime for each in self._sessions.values()), default=math.inf) / 2
        if sum(self._seconds.values()) >= max_seconds:
            worst = max(sorted(self._seconds), key=self._seconds.__getitem__)
            self._sessions[worst].give_up(
                f"other clients waited {self._seconds[worst]:.0f} s for {worst}, longer than for "
                "any other client, and half of round-timeout was spent waiting"
            )

    def restart(self, client: str) -> None:
        """Note that a client has sent a frame; ``end_late`` measures its delay from now."""
        if client in self._awaited:
            self._awaited[client] = time.monotonic()

    def end_late(self, gather_timeout: float) -> None:
        """End the lanes of clients that others have waited ``gather_timeout`` seconds for."""
        now = time.monotonic()
        for client, since in self._awaited.items():
            if now - since >= gather_timeout:
                self._sessions[client].give_up(
                    f"other clients waited {now - since:.0f} s for {client} "
                    f"(split.gather-timeout = {gather_timeout:g})"
                )
