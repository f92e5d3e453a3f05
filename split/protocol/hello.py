"""The format of M1, the first message of a handshake, and the common prefix of all messages.

``docs/wire.md`` specifies every byte.
"""

import struct
from dataclasses import dataclass, field
from io import BytesIO

from split.protocol.errors import Refusal, refused
from split.protocol.key_schedule import MAC_BYTES
from split.protocol.keys import KEY_IDENTIFIER_BYTES, SUITE_NUMBERS, WRAPPED_BYTES
from split.protocol.tickets import IDENTIFIER_BYTES, NAME_BYTES, Identity

VERSION = 4
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
    run, node = hello.identity.run.encode(), hello.identity.node.encode()
    return b"".join(
        (
            prefix(1),
            _HELLO.pack(hello.suite, hello.identity.round),
            bytes([len(run)]) + run,
            bytes([len(node)]) + node,
            hello.ticket,
            hello.share,
            hello.key,
        )
    )


def read_hello(message: bytes) -> Hello:
    """Parse M1 without checking its MAC.

    Raise a HandshakeError if M1 is malformed, or has an unknown version or suite.
    """
    check_prefix(message, 1)
    if len(message) > MAX_HELLO_BYTES:
        raise refused(Refusal.MALFORMED)
    rest = BytesIO(message[PREFIX_BYTES:-MAC_BYTES])
    number, round_ = _HELLO.unpack(_take(rest, _HELLO.size))
    lengths = {SUITE_NUMBERS[suite]: length for suite, length in WRAPPED_BYTES.items()}
    if number not in lengths:
        raise refused(Refusal.SUITE)
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
        raise refused(Refusal.MALFORMED)
    return hello


def prefix(number: int) -> bytes:
    """Return the prefix of the message with this number."""
    return _PREFIX.pack(_MAGIC, VERSION, number)


def check_prefix(message: bytes, number: int) -> None:
    """Raise a HandshakeError unless a message begins with the prefix for this number."""
    if len(message) < PREFIX_BYTES:
        raise refused(Refusal.MALFORMED)
    magic, version, found = _PREFIX.unpack_from(message)
    if magic != _MAGIC or found != number:
        raise refused(Refusal.MALFORMED)
    if version != VERSION:
        raise refused(Refusal.VERSION)


def _take(rest: BytesIO, count: int) -> bytes:
    taken = rest.read(count)
    if len(taken) < count:
        raise refused(Refusal.MALFORMED)
    return taken


def _take_text(rest: BytesIO) -> str:
    (length,) = _take(rest, 1)
    if not length:
        raise refused(Refusal.MALFORMED)
    try:
        return _take(rest, length).decode()
    except UnicodeDecodeError:
        raise refused(Refusal.MALFORMED) from None
