"""Tickets: who may open a lane.

A ticket travels to its client over a channel that is secret already. On a lane's wire only its
identifier is seen; its secret keys the first message's MAC and enters the lane's keys. Most are
spent by the lane that they open. A standing one opens any number until it expires: the lanes' keys
differ even so, for each handshake has fresh shares and a fresh wrapped secret.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from split.protocol.errors import Refusal, refused

IDENTIFIER_BYTES = 16
SECRET_BYTES = 32
NAME_BYTES = 255  # longest run or node, in UTF-8
# How long a ticket that can't be used any more is still refused by its own name.
_REMEMBERED_SECONDS = 3600.0
# Only who has its secret can make one of a ticket's first messages.
_REMEMBERED_HELLOS = 64
_REMEMBERED_HELLOS_OF_STANDING = 2**14


@dataclass(frozen=True)
class Identity:
    """What a lane is for; both sides are sure of it once the handshake is finished.

    Attributes:
        run: identifier of the run, 1 to 255 bytes of UTF-8.
        round: number of the round, below 2³².
        node: the client's name, 1 to 255 bytes of UTF-8.

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
    standing: bool = False
    used: bool = False
    hellos: dict[bytes, None] = field(default_factory=dict)  # oldest first


class TicketBook:
    """The server's tickets. Every method may be called from any thread.

    Args:
        clock: seconds that never go backwards.

    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}

    def issue(self, identity: Identity, lifetime: float, standing: bool = False) -> Ticket:
        """Make a new ticket.

        Args:
            identity: whom and what it is for.
            lifetime: seconds until it expires.
            standing: whether it opens any number of lanes until then, instead of one.

        """
        ticket = Ticket(secrets.token_bytes(IDENTIFIER_BYTES), secrets.token_bytes(SECRET_BYTES))
        self._register(ticket, identity, lifetime, standing)
        return ticket

    def register(self, ticket: Ticket, identity: Identity, lifetime: float) -> None:
        """Accept a ticket that both sides derived: a lane's resumption, for reconnecting.

        One that was used may be accepted again: it may be that the client didn't get the lane.

        Args:
            ticket: the lane's ``resumption``.
            identity: the lane's ``identity``.
            lifetime: seconds until it expires.

        """
        self._register(ticket, identity, lifetime, standing=False)

    def find(self, identifier: bytes) -> tuple[Ticket, Identity]:
        """Look a ticket up that has been presented; it isn't spent by that.

        Raises:
            TicketError: it is unknown, expired or used.

        """
        with self._lock:
            entry = self._valid(identifier)
            return Ticket(identifier, entry.secret), entry.identity

    def note_hello(self, identifier: bytes, mac: bytes) -> None:
        """Remember a handshake's first message, so that those who heard it can't use it again.

        Args:
            identifier: of the ticket.
            mac: the message's; it must have been found right.

        Raises:
            LaneBusyError: it has come before. The ticket is still good for another one.
            TicketError: the ticket is unknown, expired or used.

        """
        with self._lock:
            entry = self._valid(identifier)
            if mac in entry.hellos:
                raise refused(Refusal.BUSY)
            entry.hellos[mac] = None
            most = _REMEMBERED_HELLOS_OF_STANDING if entry.standing else _REMEMBERED_HELLOS
            if len(entry.hellos) > most:
                del entry.hellos[next(iter(entry.hellos))]

    def spend(self, identifier: bytes) -> None:
        """Use a ticket up, unless it is a standing one; of several threads that try, one succeeds.

        Raises:
            TicketError: it is unknown, expired or used.

        """
        with self._lock:
            entry = self._valid(identifier)
            if entry.standing:
                return
            entry.used = True
            entry.secret = bytes(SECRET_BYTES)  # nobody needs it again

    def _register(
        self, ticket: Ticket, identity: Identity, lifetime: float, standing: bool
    ) -> None:
        now = self._clock()
        with self._lock:
            self._forget(now)
            entry = _Entry(identity, ticket.secret, now + lifetime, standing)
            if ticket.identifier in self._entries:
                entry.hellos = self._entries[ticket.identifier].hellos
            self._entries[ticket.identifier] = entry

    def _valid(self, identifier: bytes) -> _Entry:
        entry = self._entries.get(identifier)
        if entry is None:
            raise refused(Refusal.TICKET_UNKNOWN)
        if entry.used:
            raise refused(Refusal.TICKET_USED)
        if self._clock() >= entry.expires:
            raise refused(Refusal.TICKET_EXPIRED)
        return entry

    def _forget(self, now: float) -> None:
        """Drop what expired long ago, so that a long run's book does not grow."""
        old = [
            key for key, entry in self._entries.items() if entry.expires < now - _REMEMBERED_SECONDS
        ]
        for key in old:
            del self._entries[key]
