"""The handshake of a stream: state machines for three messages, without I/O.

M1 client → server: identity, ticket, ephemeral X25519 share, secret encrypted to the server's key,
MAC with the ticket's secret. M2 server → client: ephemeral X25519 share, the server's finished MAC.
M3 client → server: the client's finished MAC. ``docs/wire.md`` specifies every byte.

Use each object for one handshake. A rejected message does not change the object's state. A ticket
for one lane is used up only when the server has decrypted the client's first record.
"""

import hmac
import secrets

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from split.protocol.errors import Refusal, refused
from split.protocol.hello import (
    PREFIX_BYTES,
    SHARE_BYTES,
    Hello,
    check_prefix,
    hello_context,
    prefix,
    read_hello,
)
from split.protocol.key_schedule import MAC_BYTES, KeySchedule, LaneSecrets, authenticate, derive
from split.protocol.keys import SECRET_BYTES as WRAPPED_SECRET_BYTES
from split.protocol.keys import SUITE_NUMBERS, KeyExchange, ServerKeys, key_identifier, wrap
from split.protocol.tickets import Identity, Ticket, TicketBook

_CLIENT, _SERVER = b"client finished", b"server finished"  # labels of the last MAC of each side
# States of a handshake.
_NEW = "new"
_HELLO = "M1 was sent or received"
_ANSWERED = "M2 was sent or received"
_FINISHED = "M3 was sent or received"


class _Handshake:
    """Base class that raises ``RuntimeError`` if methods are called in the wrong order."""

    _state = _NEW

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise RuntimeError(f"the handshake is at {self._state!r}, not {state!r}")


class ClientHandshake(_Handshake):
    """The client's side of a handshake, with the ticket's identity and the server's current key."""

    def __init__(
        self, ticket: Ticket, identity: Identity, server_public: bytes, suite: KeyExchange
    ) -> None:
        self._ticket = ticket
        self._identity = identity
        self._server_public = server_public
        self._suite: KeyExchange = suite
        self._private = X25519PrivateKey.generate()
        self._secret = secrets.token_bytes(WRAPPED_SECRET_BYTES)
        self._hello = b""

    def hello(self) -> bytes:
        """Return M1; raise a HandshakeError if the server's public key is not of this suite."""
        self._expect(_NEW)
        hello = Hello(
            suite=SUITE_NUMBERS[self._suite],
            identity=self._identity,
            ticket=self._ticket.identifier,
            share=self._private.public_key().public_bytes_raw(),
            key=key_identifier(self._suite, self._server_public),
            wrapped=b"",
        )
        context = hello_context(hello)
        body = context + wrap(self._suite, self._server_public, self._secret, context)
        self._hello = body + _hello_mac(self._ticket, body)
        self._state = _HELLO
        return self._hello

    def finish(self, answer: bytes) -> tuple[bytes, LaneSecrets]:
        """Check M2; return M3 and the stream's keys.

        Raise a HandshakeError if M2 is malformed, or its sender lacks the ticket's secret or the
        server's private key.
        """
        self._expect(_HELLO)
        check_prefix(answer, 2)
        if len(answer) != PREFIX_BYTES + SHARE_BYTES + MAC_BYTES:
            raise refused(Refusal.MALFORMED)
        shared = _agree(self._private, answer[PREFIX_BYTES:-MAC_BYTES])
        schedule = KeySchedule(shared, self._secret, self._ticket.secret)
        transcript = self._hello + answer[:-MAC_BYTES]
        _compare(answer[-MAC_BYTES:], schedule.finished(_SERVER, transcript))
        transcript = self._hello + answer + prefix(3)
        mac = schedule.finished(_CLIENT, transcript)
        self._state = _FINISHED
        return prefix(3) + mac, schedule.secrets(transcript + mac)


class ServerHandshake(_Handshake):
    """The server's side of a handshake."""

    def __init__(self, keys: ServerKeys, tickets: TicketBook) -> None:
        self._keys = keys
        self._tickets = tickets

    def read(self, hello: bytes) -> Identity:
        """Check M1 and return the identity of the lane, without public-key operations.

        No message is accepted twice.

        Raise ``HandshakeError`` if M1 is malformed, altered or made without the ticket's secret, or
        its suite is not the server's. Raise ``TicketError`` if the ticket is unknown, expired, used
        or issued for a different identity. Raise ``LaneBusyError`` if the same message was received
        before. A client can retry with a new M1.
        """
        self._expect(_NEW)
        message = read_hello(hello)
        ticket, identity = self._tickets.find(message.ticket)
        _compare(hello[-MAC_BYTES:], _hello_mac(ticket, hello[:-MAC_BYTES]))
        if message.identity != identity:
            raise refused(Refusal.TICKET_FOREIGN)
        if message.suite != SUITE_NUMBERS[self._keys.suite]:
            raise refused(Refusal.SUITE)
        self._tickets.note_hello(message.ticket, hello[-MAC_BYTES:])
        self._message, self._ticket, self._transcript = message, ticket, hello
        self._state = _HELLO
        return identity

    def answer(self) -> bytes:
        """Return M2.

        Raise ``HandshakeError`` if the secret can't be decrypted, or the client's share is invalid.
        Raise ``ServerKeyError`` if the secret is encrypted to a key other than the current one.
        """
        self._expect(_HELLO)
        message = self._message
        wrapped = self._keys.unwrap(message.key, message.wrapped, hello_context(message))
        private = X25519PrivateKey.generate()
        share = private.public_key().public_bytes_raw()
        self._schedule = KeySchedule(_agree(private, message.share), wrapped, self._ticket.secret)
        body = prefix(2) + share
        answer = body + self._schedule.finished(_SERVER, self._transcript + body)
        self._transcript += answer
        self._state = _ANSWERED
        return answer

    def accept(self, finished: bytes) -> tuple[LaneSecrets, bytes]:
        """Check M3; return the stream's keys and the identifier of the ticket.

        Raise a HandshakeError if M3 is malformed or altered, or its sender does not have the keys.
        """
        self._expect(_ANSWERED)
        check_prefix(finished, 3)
        if len(finished) != PREFIX_BYTES + MAC_BYTES:
            raise refused(Refusal.MALFORMED)
        transcript = self._transcript + finished[:-MAC_BYTES]
        _compare(finished[-MAC_BYTES:], self._schedule.finished(_CLIENT, transcript))
        self._state = _FINISHED
        return self._schedule.secrets(self._transcript + finished), self._ticket.identifier


def _hello_mac(ticket: Ticket, body: bytes) -> bytes:
    return authenticate(derive(secret=ticket.secret, label=b"hello", context=b"", length=32), body)


def _compare(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise refused(Refusal.AUTHENTICATION)


def _agree(private: X25519PrivateKey, share: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError:  # a point of small order, for which the shared secret would be public
        raise refused(Refusal.MALFORMED) from None
