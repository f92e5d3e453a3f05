"""Tickets: the right to open a lane.

A ticket travels to its client over a channel that is secret already. On a lane's wire only its
identifier is seen; its secret keys the first message's MAC and enters the stream's keys. Most open
one lane. A standing one opens any number until it expires; their keys differ even so, because each
handshake has fresh shares and a fresh wrapped secret.

Each handshake also yields a *resumption ticket*, for the next stream of the same lane. A client
uses the one of the last stream that the server has confirmed to it. A confirmation may get lost, so
all tickets of a lane stay good until the client's first record over one of its streams has been
opened; from then on only that stream's own is.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from split.protocol.errors import Refusal, refused

IDENTIFIER_BYTES = 16
SECRET_BYTES = 32
NAME_BYTES = 255  # longest run or node, in UTF-8
# How long a ticket that can't be used any more is still refused by name.
_REMEMBERED_SECONDS = 3600.0
# Making one of a ticket's first messages takes its secret.
_REMEMBERED_HELLOS = 64
_REMEMBERED_HELLOS_OF_STANDING = 2**14
_TICKETS_OF_A_LANE = 8
_LANES_OF_A_STANDING_TICKET = 64


@dataclass(frozen=True)
class Identity:
    """Run, round and client of a lane; verified by both sides when the handshake is finished.

    Attributes:
        run: Identifier of the run, 1 to 255 bytes of UTF-8.
        round: Number of the round, below 2³².
        node: Name of the client, 1 to 255 bytes of UTF-8.

    """

    run: str
    round: int
    node: str

    def __post_init__(self) -> None:
        for name, value in (("run", self.run), ("node", self.node)):
            if not 1 <= len(value.encode()) <= NAME_BYTES:
                raise ValueError(f"the {name} of a lane has 1 to {NAME_BYTES} bytes, not {value!r}")
        if not 0 <= self.round < 2**32:
            raise ValueError(f"the round of a lane is a number below 2³², not {self.round}")


@dataclass(frozen=True)
class Ticket:
    """The right to open a lane.

    Attributes:
        identifier: 16 bytes, seen on the wire.
        secret: 32 bytes, never seen on a lane's wire.

    """

    identifier: bytes
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.identifier) != IDENTIFIER_BYTES or len(self.secret) != SECRET_BYTES:
            raise ValueError(
                f"a ticket is {IDENTIFIER_BYTES} bytes of identifier and {SECRET_BYTES} of secret"
            )


@dataclass
class _Entry:
    identity: Identity
    secret: bytes = field(repr=False)
    expires: float
    lane: bytes | None  # that it opens a stream of; None for a standing ticket
    issued: bool = True  # by the server; a resumption ticket isn't
    used: bool = False
    lanes: deque[bytes] = field(default_factory=deque)  # a standing ticket's lanes, oldest first
    hellos: dict[bytes, None] = field(default_factory=dict)  # oldest first


class TicketBook:
    """The server's tickets. Callers serialise access with a lock of their own.

    Args:
        clock: Seconds that never go backwards.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: dict[bytes, _Entry] = {}
        self._tickets_of: dict[bytes, list[bytes]] = {}  # by lane; those still good, oldest first

    def issue(self, identity: Identity, lifetime: float, standing: bool = False) -> Ticket:
        """Make a new ticket.

        Args:
            identity: Identity that it is for.
            lifetime: Seconds until it expires.
            standing: Whether it opens any number of lanes until then, instead of one.

        """
        self._forget()
        ticket = Ticket(secrets.token_bytes(IDENTIFIER_BYTES), secrets.token_bytes(SECRET_BYTES))
        lane = None if standing else secrets.token_bytes(IDENTIFIER_BYTES)
        self._add(
            ticket,
            _Entry(
                identity=identity, secret=ticket.secret, expires=self._clock() + lifetime, lane=lane
            ),
        )
        return ticket

    def find(self, identifier: bytes) -> tuple[Ticket, Identity]:
        """Look up a ticket that has been presented; it isn't spent by that.

        Raises:
            TicketError: It is unknown, expired or used.

        """
        entry = self._valid(identifier)
        return Ticket(identifier, entry.secret), entry.identity

    def note_hello(self, identifier: bytes, mac: bytes) -> None:
        """Remember a handshake's first message, so that an eavesdropper can't use it again.

        Args:
            identifier: Identifier of the ticket.
            mac: The message's, which has been verified.

        Raises:
            LaneBusyError: It has come before. The ticket is still good for another one.
            TicketError: The ticket is unknown, expired or used.

        """
        entry = self._valid(identifier)
        if mac in entry.hellos:
            raise refused(Refusal.BUSY)
        entry.hellos[mac] = None
        most = _REMEMBERED_HELLOS if entry.lane else _REMEMBERED_HELLOS_OF_STANDING
        if len(entry.hellos) > most:
            del entry.hellos[next(iter(entry.hellos))]

    def accept(self, identifier: bytes, resumption: Ticket) -> bytes:
        """Note a finished handshake, whose stream's ticket is good from now on.

        Args:
            identifier: Identifier of the ticket that was used; it stays good.
            resumption: The new stream's own.

        Returns:
            The lane that the stream belongs to: a new one with a standing ticket.

        Raises:
            TicketError: The ticket is unknown, expired or used.

        """
        self._forget()
        used = self._valid(identifier)
        lane = used.lane or secrets.token_bytes(IDENTIFIER_BYTES)
        entry = _Entry(
            identity=used.identity,
            secret=resumption.secret,
            expires=used.expires,
            lane=lane,
            issued=False,
        )
        self._add(resumption, entry)
        if used.lane is None:
            used.lanes.append(lane)
            if len(used.lanes) > _LANES_OF_A_STANDING_TICKET:
                self.close(used.lanes.popleft())
        tickets = self._tickets_of[lane]
        if used.lane:  # a client keeps using it until it learns of a newer one
            tickets.remove(identifier)
            tickets.append(identifier)
        while len(tickets) > _TICKETS_OF_A_LANE:
            self._spend(tickets.pop(0))
        return lane

    def confirm(self, lane: bytes, resumption: bytes) -> None:
        """Spend all of a lane's tickets but one: the client's first record has been opened.

        Args:
            lane: As ``accept`` returned it.
            resumption: Identifier of the confirmed stream's own ticket.

        Raises:
            TicketError: It is no longer good: the client has confirmed a newer stream.

        """
        self._valid(resumption)
        for identifier in self._tickets_of[lane]:
            if identifier != resumption:
                self._spend(identifier)
        self._tickets_of[lane] = [resumption]

    def close(self, lane: bytes) -> None:
        """Forget a lane: none of its tickets is good any more."""
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
        entry.secret = bytes(SECRET_BYTES)  # nobody needs it again

    def _valid(self, identifier: bytes) -> _Entry:
        entry = self._entries.get(identifier)
        if entry is None:
            raise refused(Refusal.TICKET_UNKNOWN)
        if entry.used:
            raise refused(Refusal.TICKET_USED)
        if self._clock() >= entry.expires:
            raise refused(Refusal.TICKET_EXPIRED)
        return entry

    def _forget(self) -> None:
        """Drop what expired long ago, so that a long run's book does not grow."""
        before = self._clock() - _REMEMBERED_SECONDS
        old = [key for key, entry in self._entries.items() if entry.expires < before]
        for key in old:
            lane = self._entries.pop(key).lane
            if lane:
                self._tickets_of.pop(lane, None)
