"""Derivation of a stream's keys from a handshake.

Each key depends on the ephemeral X25519 secret, the secret that was encrypted to the server's key,
the ticket's secret, and the hash of the handshake's bytes so far. A side that lacks one of these
secrets, or received different bytes, derives different keys.
"""

import hashlib
import hmac
from dataclasses import dataclass, field

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from split.protocol.tickets import Ticket

_PROTOCOL = b"chambers lane 3"
MAC_BYTES = 32


@dataclass(frozen=True)
class LaneSecrets:
    """Secrets that both sides have after a handshake."""

    up: bytes = field(repr=False)  # AES-256 key from client to server
    down: bytes = field(repr=False)  # AES-256 key from server to client
    resumption: Ticket = field(repr=False)  # ticket for the lane's next stream


class KeySchedule:
    """HKDF-SHA-256 over the X25519 secret, the encrypted secret and the ticket's secret."""

    def __init__(self, shared: bytes, wrapped: bytes, ticket: bytes) -> None:
        self._secrets = shared + wrapped + ticket

    def _derive(self, label: bytes, transcript: bytes, length: int) -> bytes:
        context = hashlib.sha256(transcript).digest()
        return derive(secret=self._secrets, label=label, context=context, length=length)

    def finished(self, label: bytes, transcript: bytes) -> bytes:
        """Return the last MAC of a side over all messages so far, excluding the MAC itself."""
        return authenticate(self._derive(label, transcript, 32), transcript)

    def secrets(self, transcript: bytes) -> LaneSecrets:
        """Return the stream's keys for the whole transcript: M1, M2 and M3."""
        return LaneSecrets(
            up=self._derive(b"up", transcript, 32),
            down=self._derive(b"down", transcript, 32),
            resumption=Ticket(
                self._derive(b"resumption identifier", transcript, 16),
                self._derive(b"resumption secret", transcript, 32),
            ),
        )


def derive(secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """Derive a key with HKDF-SHA-256; the salt is the protocol's name, info is label + context."""
    info = bytes([len(label)]) + label + context
    return HKDF(hashes.SHA256(), length, salt=_PROTOCOL, info=info).derive(secret)


def authenticate(key: bytes, message: bytes) -> bytes:
    """Return the HMAC-SHA-256 of a message, 32 bytes."""
    return hmac.digest(key, message, "sha256")
