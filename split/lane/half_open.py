"""Limits on the number and the duration of handshakes in progress at a server.

Anyone who can reach the port can open streams. The limits ensure that clients can connect during a
flood of streams. No message has arrived yet on a *silent* stream, so the peer is unknown. The first
message on an *answered* stream has proved possession of a ticket.
"""

import ipaddress
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from split.lane.transport import time_limit
from split.protocol.errors import HandshakeError, Refusal
from split.protocol.tickets import Identity

_LOG = logging.getLogger(__name__)
_LOG_SECONDS = 10.0


def host_of(peer: str) -> str:
    """Return the IPv4 address or the IPv6 network (/64) of a peer.

    gRPC describes peers as ``ipv4:127.0.0.1:4711`` or ``ipv6:%5B::1%5D:4711``.
    """
    address = peer.partition(":")[2]
    return network_of(address.rpartition(":")[0].removeprefix("%5B").removesuffix("%5D"))


def network_of(host: str) -> str:
    """Return an IPv4 address as it is, and the network (/64) of an IPv6 address.

    A host with one address in a /64 network can usually use all addresses of the network.
    """
    try:
        return str(ipaddress.ip_network((host.partition("%")[0].strip("[]"), 64), strict=False))
    except ValueError:
        return host


class SilentStreams:
    """Limits streams that wait for their first message: ``max_streams``, for ``seconds`` each.

    A legitimate client sends its first message immediately, so its stream is silent only
    briefly. If there are too many streams, the oldest stream of the address with the most streams
    is ended, so a flood from one address mainly ends the streams of that address.
    """

    def __init__(self, max_streams: int, seconds: float) -> None:
        self._max_streams = max_streams
        self._seconds = seconds
        self._lock = threading.Lock()
        self._streams: dict[Callable[[], object], str] = {}  # hosts by ``end``, oldest stream first

    @contextmanager
    def count(self, host: str, end: Callable[[], object]) -> Iterator[None]:
        """Count a stream while the ``with`` block waits for its first message.

        ``end``, which ends the stream, is called on a timeout or if there are too many streams.
        """
        with self._lock:
            displaced = None
            if len(self._streams) >= self._max_streams:
                ((crowded, _),) = Counter(self._streams.values()).most_common(1)
                displaced = next(key for key, its in self._streams.items() if its == crowded)
                del self._streams[displaced]
            self._streams[end] = host
        if displaced is not None:
            displaced()
        try:
            with time_limit(self._seconds, end):
                yield
        finally:
            with self._lock:
                self._streams.pop(end, None)


class AnsweredHandshakes:
    """Limits handshakes that have begun but wait for the client's confirmation.

    At most ``max_handshakes`` handshakes may wait, each for ``seconds``. The limit per identity,
    ``max_per_identity``, prevents one client from using up the total.
    """

    def __init__(self, max_handshakes: int, max_per_identity: int, seconds: float) -> None:
        self._max_handshakes = max_handshakes
        self._max_per_identity = max_per_identity
        self._seconds = seconds
        self._lock = threading.Lock()
        self._taken: Counter[Identity] = Counter()

    @contextmanager
    def count(self, identity: Identity, end: Callable[[], object]) -> Iterator[None]:
        """Count a handshake towards the limits while the ``with`` block completes it.

        ``end``, which ends the handshake's stream, is called when the time limit expires. Raise a
        HandshakeError if there are too many handshakes.
        """
        with self._lock:
            own = self._taken[identity]
            if self._taken.total() >= self._max_handshakes or own >= self._max_per_identity:
                raise HandshakeError(Refusal.BUSY)
            self._taken[identity] += 1
        try:
            with time_limit(self._seconds, end):
                yield
        finally:
            with self._lock:
                self._taken -= Counter([identity])  # this also removes identities at 0


class RefusedHandshakes:
    """Logs refused handshakes at a limited rate, because anyone can cause them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0  # since the last log line
        self._next_line = 0.0

    def note(self, reason: object) -> None:
        """Count a refusal, and log the number and this reason if the last line is long ago."""
        with self._lock:
            self._count += 1
            if time.monotonic() < self._next_line:
                return
            count, self._count = self._count, 0
            self._next_line = time.monotonic() + _LOG_SECONDS
        _LOG.info("handshakes refused since the last such message: %d; latest: %s", count, reason)
