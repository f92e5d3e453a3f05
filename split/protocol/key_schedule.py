"""Derive a stream's keys from a handshake.

Everything enters every key: the fresh X25519 secret, the secret wrapped to the server's key, the
ticket's secret, and the hash of the handshake's bytes so far. A party that lacks one of them, or
saw other bytes, derives different keys.
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
    """Secrets that both sides have after a handshake.

    Attributes:
        up: AES-256 key of what the client sends.
        down: AES-256 key of what the server sends.
        resumption: Ticket for the next stream of the lane.

    """

    up: bytes = field(repr=False)
    down: bytes = field(repr=False)
    resumption: Ticket = field(repr=False)


class KeySchedule:
    """HKDF-SHA-256 over a handshake's three secrets.

    Args:
        shared: The X25519 secret of the two fresh shares, 32 bytes.
        wrapped: The secret that the client wrapped to the server's key, 32 bytes.
        ticket: The ticket's secret, 32 bytes.

    """

    def __init__(self, shared: bytes, wrapped: bytes, ticket: bytes) -> None:
        self._secrets = shared + wrapped + ticket

    def _derive(self, label: bytes, transcript: bytes, length: int) -> bytes:
        context = hashlib.sha256(transcript).digest()
        return derive(secret=self._secrets, label=label, context=context, length=length)

    def server_finished(self, transcript: bytes) -> bytes:
        """Return the server's MAC over M1 and M2 up to that MAC."""
        return authenticate(self._derive(b"server finished", transcript, 32), transcript)

    def client_finished(self, transcript: bytes) -> bytes:
        """Return the client's MAC over M1, M2, and M3 up to that MAC."""
        return authenticate(self._derive(b"client finished", transcript, 32), transcript)

    def secrets(self, transcript: bytes) -> LaneSecrets:
        """Return the stream's keys from the whole handshake, M1, M2 and M3."""
        return LaneSecrets(
            up=self._derive(b"up", transcript, 32),
            down=self._derive(b"down", transcript, 32),
            resumption=Ticket(
                self._derive(b"resumption identifier", transcript, 16),
                self._derive(b"resumption secret", transcript, 32),
            ),
        )


def derive(secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """Derive a key: HKDF-SHA-256, the protocol as salt, label and context as info."""
    info = bytes([len(label)]) + label + context
    return HKDF(hashes.SHA256(), length, salt=_PROTOCOL, info=info).derive(secret)


def authenticate(key: bytes, message: bytes) -> bytes:
    """Return HMAC-SHA-256, 32 bytes."""
    return hmac.digest(key, message, "sha256")
