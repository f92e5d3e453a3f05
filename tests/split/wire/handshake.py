"""The handshake of docs/wire.md, implemented from that page: M1, M2, M3 and the key schedule."""

import base64
import hashlib
import hmac
import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric import mlkem, padding
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import load_der_public_key

VERSION = 4
SUITES = {"ml-kem-768-x25519": 1, "rsa-3072": 2}
WRAP_LABEL = b"chambers lane 3 wrap"
MAC_BYTES = 32


@dataclass(frozen=True)
class Ticket:
    """A ticket, or a resumption ticket."""

    identifier: bytes
    secret: bytes


@dataclass(frozen=True)
class Invitation:
    """The data that a client receives over a different channel."""

    address: str
    suite: str
    server_key: bytes
    run: str
    round: int
    node: str
    ticket: Ticket

    @classmethod
    def read(cls, file: Path) -> "Invitation":
        """Read the file that ``chambers serve`` writes."""
        found = json.loads(file.read_text())
        assert found["format"] == "chambers invitation 1"
        decode = base64.urlsafe_b64decode
        return cls(
            address=found["address"],
            suite=found["suite"],
            server_key=decode(found["server_key"]),
            run=found["run"],
            round=0,
            node=found["client"],
            ticket=Ticket(decode(found["ticket"]), decode(found["secret"])),
        )


@dataclass(frozen=True)
class StreamSecrets:
    """The keys and the ticket that result from a finished handshake."""

    up: bytes
    down: bytes
    resumption: Ticket


def derive(secret: bytes, label: str, context: bytes, size: int) -> bytes:
    """Derive a key with the function that the page calls ``derive``."""
    info = bytes([len(label)]) + label.encode() + context
    return HKDF(hashes.SHA256(), size, b"chambers lane 3", info).derive(secret)


def mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")


def prefix(number: int) -> bytes:
    return b"CHLN" + bytes([VERSION, number])


def hello_front(
    invitation: Invitation, ticket: Ticket, share: bytes, key_identifier: bytes
) -> bytes:
    """Return the bytes before the wrapped secret in M1."""
    run, node = invitation.run.encode(), invitation.node.encode()
    return b"".join(
        [
            prefix(1),
            struct.pack(">BI", SUITES[invitation.suite], invitation.round),
            bytes([len(run)]) + run,
            bytes([len(node)]) + node,
            ticket.identifier,
            share,
            key_identifier,
        ]
    )


def write_hello(front: bytes, wrapped: bytes, ticket: Ticket) -> bytes:
    """Return M1."""
    body = front + wrapped
    return body + mac(derive(ticket.secret, "hello", b"", 32), body)


def finished(secrets: bytes, side: str, transcript: bytes) -> bytes:
    """Return the MAC of M2 (``side`` is "server") or M3 ("client")."""
    digest = hashlib.sha256(transcript).digest()
    return mac(derive(secrets, f"{side} finished", digest, 32), transcript)


def stream_secrets(secrets: bytes, transcript: bytes) -> StreamSecrets:
    """Return the keys of a stream and the next ticket."""
    digest = hashlib.sha256(transcript).digest()
    return StreamSecrets(
        up=derive(secrets, "up", digest, 32),
        down=derive(secrets, "down", digest, 32),
        resumption=Ticket(
            derive(secrets, "resumption identifier", digest, 16),
            derive(secrets, "resumption secret", digest, 32),
        ),
    )


def wrap(suite: str, server_key: bytes, secret: bytes, front: bytes) -> bytes:
    """Encrypt a secret with the server's public key, for one M1."""
    if suite == "rsa-3072":
        oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), WRAP_LABEL + front)
        return load_der_public_key(server_key).encrypt(secret, oaep)
    key = hpke.MLKEM768X25519PublicKey(
        mlkem.MLKEM768PublicKey.from_public_bytes(server_key[:1184]),
        X25519PublicKey.from_public_bytes(server_key[1184:]),
    )
    chosen = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    return chosen.encrypt(secret, key, info=WRAP_LABEL + front)


class Handshake:
    """The client's side of one handshake.

    Attributes:
        hello: M1.

    """

    def __init__(self, invitation: Invitation, ticket: Ticket) -> None:
        self._ticket = ticket
        self._private = X25519PrivateKey.generate()
        self._wrapped_secret = os.urandom(32)
        suite, key = invitation.suite, invitation.server_key
        front = hello_front(
            invitation,
            ticket,
            share=self._private.public_key().public_bytes_raw(),
            key_identifier=hashlib.sha256(bytes([SUITES[suite]]) + key).digest(),
        )
        wrapped = wrap(suite, key, self._wrapped_secret, front)
        self.hello = write_hello(front, wrapped, ticket)

    def answer(self, second: bytes) -> tuple[bytes, StreamSecrets]:
        """Process M2.

        Returns:
            M3, and the keys of the stream.

        Raises:
            ValueError: M2 is malformed, or was not sent by the server.

        """
        if len(second) != 70 or second[:6] != prefix(2):
            raise ValueError("M2 is malformed")
        content, found = second[:-MAC_BYTES], second[-MAC_BYTES:]
        shared = self._private.exchange(X25519PublicKey.from_public_bytes(content[6:]))
        secrets = shared + self._wrapped_secret + self._ticket.secret
        if not hmac.compare_digest(finished(secrets, "server", self.hello + content), found):
            raise ValueError("the MAC of M2 is wrong")
        third = prefix(3)
        third += finished(secrets, "client", self.hello + second + third)
        return third, stream_secrets(secrets, self.hello + second + third)
