"""Limit of the time in a round for which clients wait for slow ones."""

import math
import time
from collections.abc import Callable, Iterable

from split.server.session import Session


class WaitBudget:
    """Adds up for how long clients have waited for each other; callers serialise access.

    Each second of waiting is divided equally among the clients that are waited for. Once half of
    the round has been spent in this way, the lane of the client with the most seconds ends, and its
    seconds no longer count. A single client can therefore take no more than half of a round,
    however punctual each of its frames is, and a round that would end within half its time loses
    nobody.

    Args:
        clock: Seconds that never go backwards.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._seconds: dict[str, float] = {}
        self._awaited: list[str] = []
        self._since = 0.0

    def add(self, session: Session) -> None:
        """Add a client that has joined."""
        client = session.account.client
        self._sessions[client], self._seconds[client] = session, 0.0

    def remove(self, client: str) -> None:
        """Forget a client that has left."""
        self.note([each for each in self._awaited if each != client])
        self._sessions.pop(client, None)
        self._seconds.pop(client, None)

    def note(self, awaited: Iterable[str]) -> None:
        """Note for whom others wait from now on; end a lane if they have waited for too long."""
        now = self._clock()
        for client in self._awaited:
            self._seconds[client] += (now - self._since) / len(self._awaited)
        self._awaited, self._since = list(awaited), now
        most = min((each.lifetime for each in self._sessions.values()), default=math.inf) / 2
        if sum(self._seconds.values()) >= most:
            worst = max(sorted(self._seconds), key=self._seconds.__getitem__)
            self._sessions[worst].give_up(
                f"others waited {self._seconds[worst]:.0f} s for {worst}, more than for anybody "
                "else, and half of the round is over in this way (round-timeout)"
            )
