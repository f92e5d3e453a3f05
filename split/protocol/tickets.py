"""Tickets, which authorise a client to open a lane, and invitations, which contain them.

A ticket is sent to its client over an existing confidential channel, and only its identifier is
sent over a lane. The ticket's secret is an input to the first message's MAC key and to the stream's
keys. Most tickets open one lane. A standing ticket opens any number of lanes until it expires; the
lanes' keys differ, because each handshake has new key shares and a new encrypted secret.

Each handshake also yields a *resumption ticket* for the next stream of the same lane. A client uses
the resumption ticket of the last stream that the server has confirmed. Because a confirmation may
be lost, up to 8 tickets of a lane remain valid until the server has decrypted the client's first
record on one of the streams; then only the resumption ticket of that stream is valid.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from split.protocol.errors import HandshakeError, Refusal

IDENTIFIER_BYTES = 16
SECRET_BYTES = 32
NAME_BYTES = 255  # maximum length of run or node, in UTF-8
# How long an expired ticket is remembered, so that the refusal states the exact reason.
_REMEMBERED_SECONDS = 3600.0
# First messages remembered per ticket: few, since only the holder of its secret can create them.
_REMEMBERED_HELLOS = 64
_REMEMBERED_HELLOS_OF_STANDING = 2**14
_TICKETS_OF_A_LANE = 8
_LANES_OF_A_STANDING_TICKET = 64


@dataclass(frozen=True)
class Identity:
    """Run, round and client of a lane, which the handshake verifies on both sides."""

    run: str  # identifier of the run, 1 to 255 bytes of UTF-8
    round: int  # number of the round, below 2³²
    node: str  # name of the client, 1 to 255 bytes of UTF-8

    def __post_init__(self) -> None:
        for name, value in (("run", self.run), ("node", self.node)):
            if not 1 <= len(value.encode()) <= NAME_BYTES:
                raise ValueError(f"the {name} of a lane has 1 to {NAME_BYTES} bytes, not {value!r}")
        if not 0 <= self.round < 2**32:
            raise ValueError(f"the round of a lane must be from 0 to 2³² - 1, not {self.round}")


@dataclass(frozen=True)
class Ticket:
    """Authorisation to open a lane."""

    identifier: bytes  # 16 bytes, visible on the network
    secret: bytes = field(repr=False)  # 32 bytes, never sent over a lane

    def __post_init__(self) -> None:
        if len(self.identifier) != IDENTIFIER_BYTES or len(self.secret) != SECRET_BYTES:
            raise ValueError(
                f"a ticket has {IDENTIFIER_BYTES} identifier bytes and {SECRET_BYTES} secret bytes"
            )


@dataclass(frozen=True)
class Invitation:
    """Everything that a client needs to open a lane; confidential."""

    address: str  # address of the block server, as host:port
    suite: str  # suite of the key exchange
    server_key: bytes  # the server's current public key
    identity: Identity
    ticket: Ticket


@dataclass
class _Entry:
    identity: Identity
    secret: bytes = field(repr=False)
    expires: float
    lane: bytes | None  # lane that the ticket opens; None if it is standing
    issued: bool = True  # False for a resumption ticket
    used: bool = False
    lanes: deque[bytes] = field(default_factory=deque)  # a standing ticket's lanes, oldest first
    hellos: dict[bytes, None] = field(default_factory=dict)  # MACs of M1, oldest first


class TicketBook:
    """The server's tickets. Not thread-safe; callers must hold a lock.

    Its length is the number of tickets and lanes in memory.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._tickets_of: dict[bytes, list[bytes]] = {}  # valid tickets by lane, oldest first

    def __len__(self) -> int:
        return len(self._entries) + len(self._tickets_of)

    def issue(self, identity: Identity, lifetime: float, standing: bool = False) -> Ticket:
        """Issue a ticket, valid for ``lifetime`` seconds; a standing one opens many lanes."""
        self._forget()
        ticket = Ticket(secrets.token_bytes(IDENTIFIER_BYTES), secrets.token_bytes(SECRET_BYTES))
        lane = None if standing else secrets.token_bytes(IDENTIFIER_BYTES)
        expires = self._clock() + lifetime
        self._add(ticket, _Entry(identity, ticket.secret, expires, lane))
        return ticket

    def find(self, identifier: bytes) -> tuple[Ticket, Identity]:
        """Look up a ticket by its identifier, without using it up.

        Raise a HandshakeError if the ticket is unknown, expired or used.
        """
        entry = self._valid(identifier)
        return Ticket(identifier, entry.secret), entry.identity

    def note_hello(self, identifier: bytes, mac: bytes) -> None:
        """Record the verified MAC of a handshake's first message, so that nobody can replay it.

        Raise ``HandshakeError`` if the ticket is unknown, expired or used. Its reason is
        ``Refusal.BUSY`` if the message was received before; the ticket remains valid.
        """
        entry = self._valid(identifier)
        if mac in entry.hellos:
            raise HandshakeError(Refusal.BUSY)
        entry.hellos[mac] = None
        max_hellos = _REMEMBERED_HELLOS if entry.lane else _REMEMBERED_HELLOS_OF_STANDING
        if len(entry.hellos) > max_hellos:
            del entry.hellos[next(iter(entry.hellos))]

    def accept(self, identifier: bytes, resumption: Ticket) -> bytes:
        """Record a finished handshake, and add the resumption ticket of its stream.

        The ticket with this identifier, which the client presented, remains valid. Return the
        identifier of the stream's lane; a standing ticket creates a new lane. Raise a
        HandshakeError if the ticket is unknown, expired or used.
        """
        self._forget()
        used = self._valid(identifier)
        lane = used.lane or secrets.token_bytes(IDENTIFIER_BYTES)
        entry = _Entry(used.identity, resumption.secret, used.expires, lane, issued=False)
        self._add(resumption, entry)
        if used.lane is None:
            used.lanes.append(lane)
            if len(used.lanes) > _LANES_OF_A_STANDING_TICKET:
                self.close(used.lanes.popleft())
        tickets = self._tickets_of[lane]
        if used.lane:  # the client presents the same ticket until the server confirms a stream
            tickets.remove(identifier)
            tickets.append(identifier)
        while len(tickets) > _TICKETS_OF_A_LANE:
            self._spend(tickets.pop(0))
        return lane

    def confirm(self, lane: bytes, resumption: bytes) -> None:
        """Invalidate all tickets of a lane except one, after the client's first record on a stream.

        ``lane`` is the lane's identifier that ``accept`` returned, and ``resumption`` the
        identifier of the stream's resumption ticket, which remains valid. Raise a HandshakeError if
        a newer stream has been confirmed, which invalidates this ticket.
        """
        self._valid(resumption)
        for identifier in self._tickets_of[lane]:
            if identifier != resumption:
                self._spend(identifier)
        self._tickets_of[lane] = [resumption]

    def close(self, lane: bytes) -> None:
        """Remove a lane, and invalidate all its tickets."""
        for identifier in self._tickets_of.pop(lane, []):
            self._spend(identifier)

    def _add(self, ticket: Ticket, entry: _Entry) -> None:
        self._entries[ticket.identifier] = entry
        if entry.lane:
            self._tickets_of.setdefault(entry.lane, []).append(ticket.identifier)

    def _spend(self, identifier: bytes) -> None:
        entry = self._entries[identifier]
        if not entry.issued:
            del self._entries[identifier]
            return
        entry.used = True
        entry.secret = bytes(SECRET_BYTES)  # no longer needed

    def _valid(self, identifier: bytes) -> _Entry:
        entry = self._entries.get(identifier)
        if entry is None:
            raise HandshakeError(Refusal.TICKET_UNKNOWN)
        if entry.used:
            raise HandshakeError(Refusal.TICKET_USED)
        if self._clock() >= entry.expires:
            raise HandshakeError(Refusal.TICKET_EXPIRED)
        return entry

    def _forget(self) -> None:
        """Remove tickets that expired long ago, to limit memory in long runs."""
        before = self._clock() - _REMEMBERED_SECONDS
        for key in [key for key, entry in self._entries.items() if entry.expires < before]:
            lane = self._entries.pop(key).lane
            if lane:
                self._tickets_of.pop(lane, None)
