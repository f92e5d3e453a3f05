"""Limits on handshakes in progress at the server: how many there may be, and for how long.

Anybody who can reach the port can open streams, so these limits protect clients from a flood. There
are two kinds of streams: *silent* ones, which have sent no message yet and may be anybody's, and
*answered* ones, whose first message has proved a ticket.
"""

import ipaddress
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from split.protocol.errors import Refusal, refused
from split.protocol.tickets import Identity


def host_of(peer: str) -> str:
    """Return the address behind a connection: an IPv4 address, or an IPv6 network (/64).

    Args:
        peer: The peer as gRPC names it, like ``ipv4:127.0.0.1:4711``, or ``ipv6:%5B::1%5D:4711``.

    """
    kind, _, address = peer.partition(":")
    host = address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
    if kind != "ipv6":
        return host
    try:
        # A host that has one address of such a network has all of them.
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


class SilentStreams:
    """Streams that have sent nothing yet; a newcomer displaces an older one if there is no room.

    An honest client's first message comes with its stream, so that it is silent for a moment only.
    The oldest stream of the address that has most is displaced, so that a flood displaces itself.

    Args:
        most: How many there may be.
        seconds: How long a stream may be silent.

    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._lock = threading.Lock()
        self._streams: dict[Callable[[], object], str] = {}  # hosts by what ends them; oldest first

    @contextmanager
    def count(self, host: str, end: Callable[[], object]) -> Iterator[None]:
        """Count a stream while the ``with`` block waits for its first message.

        Args:
            host: Address that the stream comes from.
            end: Ends the stream; called if it is silent for too long, or displaced.

        """
        with self._lock:
            displaced = self._displaced() if len(self._streams) >= self._most else None
            self._streams[end] = host
        if displaced is not None:
            displaced()
        try:
            with time_limit(self._seconds, end):
                yield
        finally:
            with self._lock:
                self._streams.pop(end, None)

    def _displaced(self) -> Callable[[], object]:
        """Remove the stream that is displaced, and return what ends it."""
        ((crowded, _),) = Counter(self._streams.values()).most_common(1)
        end = next(end for end, host in self._streams.items() if host == crowded)
        del self._streams[end]
        return end


class AnsweredHandshakes:
    """Handshakes between their first message and the client's confirmation.

    One ticket can't take all the room.

    Args:
        most: How many there may be.
        each: How many of them may be of one identity.
        seconds: How long each may last.

    """

    def __init__(self, most: int, each: int, seconds: float) -> None:
        self._most = most
        self._each = each
        self._seconds = seconds
        self._lock = threading.Lock()
        self._taken: Counter[Identity] = Counter()

    @contextmanager
    def count(self, identity: Identity, end: Callable[[], object]) -> Iterator[None]:
        """Count a handshake towards the limits while the ``with`` block completes it.

        Args:
            identity: Identity that the handshake is for.
            end: Ends the stream; called when the time limit is exceeded.

        Raises:
            LaneBusyError: There is no room.

        """
        with self._lock:
            if self._taken.total() >= self._most or self._taken[identity] >= self._each:
                raise refused(Refusal.BUSY)
            self._taken[identity] += 1
        try:
            with time_limit(self._seconds, end):
                yield
        finally:
            with self._lock:
                self._taken[identity] -= 1
                if not self._taken[identity]:
                    del self._taken[identity]


@contextmanager
def time_limit(seconds: float, end: Callable[[], object]) -> Iterator[None]:
    """Call ``end`` if the ``with`` block takes too long."""
    limit = threading.Timer(seconds, end)
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()
