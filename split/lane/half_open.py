"""Handshakes under way at the server: how many, for how long, and who goes first.

Whoever can reach the port can open streams, so these limits are what stands between a flood and the
clients. Two kinds of streams are told apart: *silent* ones, which have sent no message yet and may
be anybody's, and *answered* ones, whose first message had a ticket's proof.
"""

import ipaddress
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from split.protocol.errors import Refusal, refused
from split.protocol.tickets import Identity


def host_of(peer: str) -> str:
    """Give the address behind a connection: an IPv4 address, or a network of IPv6 (/64).

    Args:
        peer: as gRPC names it, like ``ipv4:127.0.0.1:4711``, or ``ipv6:%5B::1%5D:4711``.

    """
    kind, _, address = peer.partition(":")
    host = address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D").strip("[]")
    if kind != "ipv6":
        return host
    try:
        # Who has one address of such a network has all of them.
        return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
    except ValueError:
        return host


class SilentStreams:
    """Streams that have sent nothing yet. A newcomer finds a place, if need be an older one's.

    An honest client's first message comes with its stream, so that it needs its place for a moment
    only. The address that has most places loses its oldest one, so that whoever floods displaces
    itself.

    Args:
        places: how many there may be.
        seconds: for which a stream may be silent.

    """

    def __init__(self, places: int, seconds: float) -> None:
        self._places = places
        self._seconds = seconds
        self._lock = threading.Lock()
        self._streams: dict[Callable[[], object], str] = {}  # hosts by what ends them; oldest first

    @contextmanager
    def place(self, host: str, end: Callable[[], object]) -> Iterator[None]:
        """Have a place while the ``with`` block waits for the first message.

        Args:
            host: whose stream it is.
            end: ends the stream; called if it is silent for too long, or loses its place.

        """
        with self._lock:
            displaced = self._displaced() if len(self._streams) >= self._places else None
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
        """Choose who loses its place, and take it away."""
        ((crowded, _),) = Counter(self._streams.values()).most_common(1)
        end = next(end for end, host in self._streams.items() if host == crowded)
        del self._streams[end]
        return end


class AnsweredHandshakes:
    """Handshakes that wait for their third message; who has a ticket can't take all places.

    Args:
        places: how many there may be.
        each: how many of them may be of one identity.
        seconds: for which each may last.

    """

    def __init__(self, places: int, each: int, seconds: float) -> None:
        self._places = places
        self._each = each
        self._seconds = seconds
        self._lock = threading.Lock()
        self._taken: Counter[Identity] = Counter()

    @contextmanager
    def place(self, identity: Identity, end: Callable[[], object]) -> Iterator[None]:
        """Have a place while the ``with`` block waits for the third message.

        Args:
            identity: what the handshake is for.
            end: ends the stream; called when its time is over.

        Raises:
            LaneBusyError: there is no place.

        """
        with self._lock:
            if self._taken.total() >= self._places or self._taken[identity] >= self._each:
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
