"""A stream's handshake: three messages, as state machines without input or output.

M1 client → server: identity, ticket, a fresh X25519 share, a secret wrapped to the server's key,
MAC with the ticket. M2 server → client: a fresh share, the server's finished-MAC. M3 client →
server: the client's finished-MAC. ``docs/wire.md`` has every byte.

Each object serves one handshake; a message that is refused leaves it as it was. The ticket is spent
only when the server has opened the client's first record.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass, field
from enum import Enum

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from split.protocol.errors import Refusal, refused
from split.protocol.key_schedule import MAC_BYTES, KeySchedule, LaneSecrets, authenticate, derive
from split.protocol.keys import (
    KEY_IDENTIFIER_BYTES,
    SUITE_NUMBERS,
    WRAPPED_BYTES,
    KeyExchange,
    ServerKeys,
    key_identifier,
    wrap,
)
from split.protocol.keys import SECRET_BYTES as WRAPPED_SECRET_BYTES
from split.protocol.tickets import IDENTIFIER_BYTES, NAME_BYTES, Identity, Ticket, TicketBook

VERSION = 2
_MAGIC = b"CHLN"
_PREFIX = struct.Struct(">4sBB")  # magic, version, number of the message
_HELLO = struct.Struct(">BI")  # suite, round; run and node follow with a length byte each
_SHARE_BYTES = 32
LONGEST_HELLO = (
    _PREFIX.size
    + _HELLO.size
    + 2 * (1 + NAME_BYTES)
    + IDENTIFIER_BYTES
    + _SHARE_BYTES
    + KEY_IDENTIFIER_BYTES
    + max(WRAPPED_BYTES.values())
    + MAC_BYTES
)


class State(Enum):
    """How far a handshake is."""

    NEW = "new"
    HELLO = "M1 was sent or received"
    ANSWERED = "M2 was sent or received"
    FINISHED = "M3 was sent or received"


class _Handshake:
    """Which step comes next; a step out of order is a fault of the caller."""

    def __init__(self) -> None:
        self.state = State.NEW

    def _expect(self, state: State) -> None:
        if self.state is not state:
            raise RuntimeError(f"the handshake is at {self.state.value!r}, not {state.value!r}")


class ClientHandshake(_Handshake):
    """The client's side.

    Args:
        ticket: The right to open this lane.
        identity: What the ticket was issued for.
        server_public: The server's public key of this period.
        suite: Suite of the key exchange.

    """

    def __init__(
        self, ticket: Ticket, identity: Identity, server_public: bytes, suite: KeyExchange
    ) -> None:
        super().__init__()
        self._ticket = ticket
        self._identity = identity
        self._server_public = server_public
        self._suite: KeyExchange = suite
        self._private = X25519PrivateKey.generate()
        self._secret = secrets.token_bytes(WRAPPED_SECRET_BYTES)
        self._hello = b""

    def hello(self) -> bytes:
        """Return M1.

        Raises:
            HandshakeError: The server's public key is not of this suite.

        """
        self._expect(State.NEW)
        body = _write_hello(
            _Hello(
                suite=SUITE_NUMBERS[self._suite],
                identity=self._identity,
                ticket=self._ticket.identifier,
                share=self._private.public_key().public_bytes_raw(),
                key=key_identifier(self._suite, self._server_public),
                wrapped=wrap(self._suite, self._server_public, self._secret),
            )
        )
        self._hello = body + _hello_mac(self._ticket, body)
        self.state = State.HELLO
        return self._hello

    def finish(self, answer: bytes) -> tuple[bytes, LaneSecrets]:
        """Check M2; return M3 and the stream's keys.

        Raises:
            HandshakeError: M2 is malformed, or its sender lacks the ticket or the server's key.

        """
        self._expect(State.HELLO)
        _check_prefix(answer, 2)
        if len(answer) != _PREFIX.size + _SHARE_BYTES + MAC_BYTES:
            raise refused(Refusal.MALFORMED)
        shared = _agree(self._private, answer[_PREFIX.size : -MAC_BYTES])
        schedule = KeySchedule(shared, self._secret, self._ticket.secret)
        _compare(answer[-MAC_BYTES:], schedule.server_finished(self._hello + answer[:-MAC_BYTES]))
        transcript = self._hello + answer + _prefix(3)
        mac = schedule.client_finished(transcript)
        self.state = State.FINISHED
        return _prefix(3) + mac, schedule.secrets(transcript + mac)


class ServerHandshake(_Handshake):
    """The server's side.

    Args:
        keys: The server's key pair.
        tickets: Tickets that it has issued.

    """

    def __init__(self, keys: ServerKeys, tickets: TicketBook) -> None:
        super().__init__()
        self._keys = keys
        self._tickets = tickets

    def read(self, hello: bytes) -> Identity:
        """Check M1 and return what the lane is to be for; no public-key work is done.

        No message is accepted twice.

        Raises:
            HandshakeError: M1 is malformed, altered, or without the ticket's secret, or the suite
                is another one.
            TicketError: The ticket is unknown, expired, used or issued for something else.
            LaneBusyError: This message has come before; a client's next one is a new one.

        """
        self._expect(State.NEW)
        message = _read_hello(hello)
        ticket, identity = self._tickets.find(message.ticket)
        _compare(hello[-MAC_BYTES:], _hello_mac(ticket, hello[:-MAC_BYTES]))
        if message.identity != identity:
            raise refused(Refusal.TICKET_FOREIGN)
        if message.suite != SUITE_NUMBERS[self._keys.suite]:
            raise refused(Refusal.SUITE)
        self._tickets.note_hello(message.ticket, hello[-MAC_BYTES:])
        self._message, self._ticket, self._transcript = message, ticket, hello
        self.state = State.HELLO
        return identity

    def answer(self) -> bytes:
        """Return M2.

        Raises:
            HandshakeError: The secret can't be unwrapped, or the client's share is no point.
            ServerKeyError: The secret is wrapped to another key.

        """
        self._expect(State.HELLO)
        message = self._message
        wrapped = self._keys.unwrap(message.key, message.wrapped)
        private = X25519PrivateKey.generate()
        share = private.public_key().public_bytes_raw()
        self._schedule = KeySchedule(_agree(private, message.share), wrapped, self._ticket.secret)
        body = _prefix(2) + share
        answer = body + self._schedule.server_finished(self._transcript + body)
        self._transcript += answer
        self.state = State.ANSWERED
        return answer

    def accept(self, finished: bytes) -> tuple[LaneSecrets, bytes]:
        """Check M3; return the stream's keys, and the identifier of the ticket that opened it.

        Raises:
            HandshakeError: M3 is malformed, altered, or its sender doesn't have the keys.

        """
        self._expect(State.ANSWERED)
        _check_prefix(finished, 3)
        if len(finished) != _PREFIX.size + MAC_BYTES:
            raise refused(Refusal.MALFORMED)
        transcript = self._transcript + finished[:-MAC_BYTES]
        _compare(finished[-MAC_BYTES:], self._schedule.client_finished(transcript))
        self.state = State.FINISHED
        return self._schedule.secrets(self._transcript + finished), self._ticket.identifier


@dataclass(frozen=True)
class _Hello:
    """M1 without its prefix and MAC."""

    suite: int
    identity: Identity
    ticket: bytes
    share: bytes
    key: bytes
    wrapped: bytes = field(repr=False)


def _write_hello(hello: _Hello) -> bytes:
    run, node = hello.identity.run.encode(), hello.identity.node.encode()
    return b"".join(
        (
            _prefix(1),
            _HELLO.pack(hello.suite, hello.identity.round),
            bytes([len(run)]) + run,
            bytes([len(node)]) + node,
            hello.ticket,
            hello.share,
            hello.key,
            hello.wrapped,
        )
    )


def _read_hello(message: bytes) -> _Hello:
    """Parse M1; its MAC is not looked at."""
    _check_prefix(message, 1)
    if len(message) > LONGEST_HELLO:
        raise refused(Refusal.MALFORMED)
    rest = _Bytes(message[_PREFIX.size : -MAC_BYTES])
    number, round_ = _HELLO.unpack(rest.take(_HELLO.size))
    lengths = {SUITE_NUMBERS[suite]: length for suite, length in WRAPPED_BYTES.items()}
    if number not in lengths:
        raise refused(Refusal.SUITE)
    run, node = rest.text(), rest.text()
    hello = _Hello(
        suite=number,
        identity=Identity(run, round_, node),
        ticket=rest.take(IDENTIFIER_BYTES),
        share=rest.take(_SHARE_BYTES),
        key=rest.take(KEY_IDENTIFIER_BYTES),
        wrapped=rest.take(lengths[number]),
    )
    rest.end()
    return hello


class _Bytes:
    """Takes bytes off the front; too few or too many are a malformed message."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def take(self, count: int) -> bytes:
        if len(self._content) < count:
            raise refused(Refusal.MALFORMED)
        taken, self._content = self._content[:count], self._content[count:]
        return taken

    def text(self) -> str:
        content = self.take(self.take(1)[0])
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise refused(Refusal.MALFORMED) from None
        if not content:
            raise refused(Refusal.MALFORMED)
        return text

    def end(self) -> None:
        if self._content:
            raise refused(Refusal.MALFORMED)


def _prefix(number: int) -> bytes:
    return _PREFIX.pack(_MAGIC, VERSION, number)


def _check_prefix(message: bytes, number: int) -> None:
    if len(message) < _PREFIX.size:
        raise refused(Refusal.MALFORMED)
    magic, version, found = _PREFIX.unpack_from(message)
    if magic != _MAGIC or found != number:
        raise refused(Refusal.MALFORMED)
    if version != VERSION:
        raise refused(Refusal.VERSION)


def _hello_mac(ticket: Ticket, body: bytes) -> bytes:
    return authenticate(derive(secret=ticket.secret, label=b"hello", context=b"", length=32), body)


def _compare(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise refused(Refusal.AUTHENTICATION)


def _agree(private: X25519PrivateKey, share: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError:  # a point of small order: the secret would be known to everybody
        raise refused(Refusal.MALFORMED) from None
