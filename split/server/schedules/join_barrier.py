"""A barrier where clients that train together wait at the beginning of a round."""

import threading
import time
from collections.abc import Callable, Iterable

from split.server.session import POLL_SECONDS


class JoinBarrier:
    """Barrier for the clients of a round, which wait for each other for ``timeout`` seconds.

    The condition ``changed`` guards this object and its owner, and is notified of changes.
    """

    def __init__(self, changed: threading.Condition, minimum: int, timeout: float) -> None:
        self._changed = changed
        self._minimum = minimum
        self._timeout = timeout
        self._invited: set[str] = set()
        self._awaited: set[str] = set()
        self.joined: set[str] = set()  # names of the clients that have joined
        self._begun = False

    def begin(self, invited: Iterable[str]) -> None:
        """Prepare for a round of the invited clients."""
        self._invited = set(invited)
        self._awaited, self.joined, self._begun = set(self._invited), set(), False

    def mark_absent(self, client: str) -> None:
        """Stop waiting for a client; it may still join."""
        with self._changed:
            self._awaited.discard(client)
            self._changed.notify_all()

    def join(self, client: str) -> None:
        """Add a client; raise a RuntimeError if the round has begun without it."""
        if self._begun:
            raise RuntimeError(
                f"{client} joined after the round had begun without it; clients wait for each "
                f"other for at most split.join-timeout = {self._timeout:g} s"
            )
        self.joined.add(client)
        self._changed.notify_all()

    def wait(self, client: str, check: Callable[[], None]) -> None:
        """Wait until all clients have joined or the timeout expires. Call with ``changed`` locked.

        Raise a RuntimeError if fewer than the minimum number of clients joined in time. ``check``
        raises the lane's error if the client's lane has ended. On an error, the client is removed.
        """
        end = time.monotonic() + self._timeout
        try:
            while not self._begun and not self._awaited <= self.joined:
                if (left := end - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, POLL_SECONDS))
                check()
            if not self._begun and len(self.joined) < self._minimum:
                raise RuntimeError(self._too_few())
        except RuntimeError:  # includes LaneError
            self.joined.discard(client)
            raise
        self._begun = True
        self._changed.notify_all()

    def _too_few(self) -> str:
        """Return why the round can't begin: the other clients are late, or will not join."""
        joined = f"{len(self.joined)} of {len(self._invited)} clients joined"
        needed = f"at least {self._minimum} must train together (min-nodes)"
        if self._awaited <= self.joined:
            return f"{joined} and the others answered that they can't, but {needed}"
        return (
            f"{joined} within split.join-timeout = {self._timeout:g} s, but {needed}; a simulation "
            "runs at most init-args-num-cpus / client-resources-num-cpus clients at once"
        )
