"""The handshake of a stream: its three messages and both sides' computations, without I/O.

``docs/wire.md`` specifies every byte of the messages: the client's M1, the server's M2, and the
client's M3.

Use each object for one handshake, and call its methods in order. A rejected message does not change
the object's state. A ticket for one lane is used up only when the server has decrypted the client's
first record.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass, field
from io import BytesIO

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from split.protocol.errors import HandshakeError, Refusal
from split.protocol.keys import (
    KEY_IDENTIFIER_BYTES,
    MAC_BYTES,
    SUITE_NUMBERS,
    WRAPPED_BYTES,
    WRAPPED_SECRET_BYTES,
    KeyExchange,
    KeySchedule,
    LaneSecrets,
    ServerKeys,
    authenticate,
    derive,
    key_identifier,
    wrap,
)
from split.protocol.tickets import IDENTIFIER_BYTES, NAME_BYTES, Identity, Ticket, TicketBook

HANDSHAKE_VERSION = 4
_MAGIC = b"CHLN"
_PREFIX = struct.Struct(">4sBB")  # magic bytes, version, number of the message
PREFIX_BYTES = _PREFIX.size
_HELLO = struct.Struct(">BI")  # suite, round; run and node follow, each after a length byte
SHARE_BYTES = 32  # X25519 public key
MAX_HELLO_BYTES = (
    PREFIX_BYTES
    + _HELLO.size
    + 2 * (1 + NAME_BYTES)
    + IDENTIFIER_BYTES
    + SHARE_BYTES
    + KEY_IDENTIFIER_BYTES
    + max(WRAPPED_BYTES.values())
    + MAC_BYTES
)
_CLIENT, _SERVER = b"client finished", b"server finished"  # labels of the last MAC of each side


class ClientHandshake:
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
        self._hello = body + hello_mac(self._ticket, body)
        return self._hello

    def finish(self, answer: bytes) -> tuple[bytes, LaneSecrets]:
        """Check M2; return M3 and the stream's keys.

        Raise a HandshakeError if M2 is malformed, or its sender lacks the ticket's secret or the
        server's private key.
        """
        check_prefix(answer, 2)
        if len(answer) != PREFIX_BYTES + SHARE_BYTES + MAC_BYTES:
            raise HandshakeError(Refusal.MALFORMED)
        shared = agree(self._private, answer[PREFIX_BYTES:-MAC_BYTES])
        schedule = KeySchedule(shared, self._secret, self._ticket.secret)
        transcript = self._hello + answer[:-MAC_BYTES]
        _compare(answer[-MAC_BYTES:], schedule.finished(_SERVER, transcript))
        transcript = self._hello + answer + prefix(3)
        mac = schedule.finished(_CLIENT, transcript)
        return prefix(3) + mac, schedule.secrets(transcript + mac)


class ServerHandshake:
    """The server's side of a handshake."""

    def __init__(self, keys: ServerKeys, tickets: TicketBook) -> None:
        self._keys = keys
        self._tickets = tickets

    def read(self, hello: bytes) -> Identity:
        """Check M1 and return the identity of the lane, without public-key operations.

        No message is accepted twice.

        Raise ``HandshakeError`` if M1 is malformed, altered or made without the ticket's secret,
        its suite is not the server's, or the ticket is unknown, expired, used or issued for a
        different identity. Its reason is ``Refusal.BUSY`` if the same message was received before.
        A client can retry with a new M1.
        """
        message = read_hello(hello)
        ticket, identity = self._tickets.find(message.ticket)
        _compare(hello[-MAC_BYTES:], hello_mac(ticket, hello[:-MAC_BYTES]))
        if message.identity != identity:
            raise HandshakeError(Refusal.TICKET_FOREIGN)
        if message.suite != SUITE_NUMBERS[self._keys.suite]:
            raise HandshakeError(Refusal.SUITE)
        self._tickets.note_hello(message.ticket, hello[-MAC_BYTES:])
        self._message, self._ticket, self._transcript = message, ticket, hello
        return identity

    def answer(self) -> bytes:
        """Return M2.

        Raise ``HandshakeError`` if the secret can't be decrypted or is encrypted to a key other
        than the current one, or the client's share is invalid.
        """
        message = self._message
        wrapped = self._keys.unwrap(message.key, message.wrapped, hello_context(message))
        private = X25519PrivateKey.generate()
        share = private.public_key().public_bytes_raw()
        self._schedule = KeySchedule(agree(private, message.share), wrapped, self._ticket.secret)
        body = prefix(2) + share
        answer = body + self._schedule.finished(_SERVER, self._transcript + body)
        self._transcript += answer
        return answer

    def accept(self, finished: bytes) -> tuple[LaneSecrets, bytes]:
        """Check M3; return the stream's keys and the identifier of the ticket.

        Raise a HandshakeError if M3 is malformed or altered, or its sender does not have the keys.
        """
        check_prefix(finished, 3)
        if len(finished) != PREFIX_BYTES + MAC_BYTES:
            raise HandshakeError(Refusal.MALFORMED)
        transcript = self._transcript + finished[:-MAC_BYTES]
        _compare(finished[-MAC_BYTES:], self._schedule.finished(_CLIENT, transcript))
        return self._schedule.secrets(self._transcript + finished), self._ticket.identifier


def hello_mac(ticket: Ticket, body: bytes) -> bytes:
    """Return the MAC of M1, which proves possession of the ticket's secret."""
    return authenticate(derive(secret=ticket.secret, label=b"hello", context=b"", length=32), body)


def _compare(mac: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(mac, expected):
        raise HandshakeError(Refusal.AUTHENTICATION)


def agree(private: X25519PrivateKey, share: bytes) -> bytes:
    """Return the shared secret; raise a HandshakeError if it would be public."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError:  # a point of small order, for which the shared secret would be public
        raise HandshakeError(Refusal.MALFORMED) from None


@dataclass(frozen=True)
class Hello:
    """M1 without its prefix and MAC."""

    suite: int  # number of the key exchange suite
    identity: Identity
    ticket: bytes  # identifier of the ticket
    share: bytes  # the client's X25519 share
    key: bytes  # identifier of the server's public key
    wrapped: bytes = field(repr=False)  # the secret, encrypted to the server's key


def hello_context(hello: Hello) -> bytes:
    """Return M1 up to the encrypted secret: the context that is needed to decrypt the secret."""
    names = (hello.identity.run.encode(), hello.identity.node.encode())
    start = prefix(1) + _HELLO.pack(hello.suite, hello.identity.round)
    start += b"".join(bytes([len(name)]) + name for name in names)
    return start + hello.ticket + hello.share + hello.key


def read_hello(message: bytes) -> Hello:
    """Parse M1 without checking its MAC.

    Raise a HandshakeError if M1 is malformed, or has an unknown version or suite.
    """
    check_prefix(message, 1)
    if len(message) > MAX_HELLO_BYTES:
        raise HandshakeError(Refusal.MALFORMED)
    rest = BytesIO(message[PREFIX_BYTES:-MAC_BYTES])
    number, round_ = _HELLO.unpack(_take(rest, _HELLO.size))
    lengths = {SUITE_NUMBERS[suite]: length for suite, length in WRAPPED_BYTES.items()}
    if number not in lengths:
        raise HandshakeError(Refusal.SUITE)
    run, node = _take_text(rest), _take_text(rest)
    hello = Hello(
        suite=number,
        identity=Identity(run, round_, node),
        ticket=_take(rest, IDENTIFIER_BYTES),
        share=_take(rest, SHARE_BYTES),
        key=_take(rest, KEY_IDENTIFIER_BYTES),
        wrapped=_take(rest, lengths[number]),
    )
    if rest.read(1):
        raise HandshakeError(Refusal.MALFORMED)
    return hello


def prefix(number: int) -> bytes:
    """Return the prefix of the message with this number."""
    return _PREFIX.pack(_MAGIC, HANDSHAKE_VERSION, number)


def check_prefix(message: bytes, number: int) -> None:
    """Raise a HandshakeError unless a message begins with the prefix for this number."""
    if len(message) < PREFIX_BYTES:
        raise HandshakeError(Refusal.MALFORMED)
    magic, version, message_number = _PREFIX.unpack_from(message)
    if magic != _MAGIC or message_number != number:
        raise HandshakeError(Refusal.MALFORMED)
    if version != HANDSHAKE_VERSION:
        raise HandshakeError(Refusal.VERSION)


def _take(rest: BytesIO, count: int) -> bytes:
    taken = rest.read(count)
    if len(taken) < count:
        raise HandshakeError(Refusal.MALFORMED)
    return taken


def _take_text(rest: BytesIO) -> str:
    (length,) = _take(rest, 1)
    if not length:
        raise HandshakeError(Refusal.MALFORMED)
    try:
        return _take(rest, length).decode()
    except UnicodeDecodeError:
        raise HandshakeError(Refusal.MALFORMED) from None
