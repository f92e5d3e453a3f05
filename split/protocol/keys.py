"""The server's rotating key pair, to which clients' secrets are encrypted, and the keys of streams.

The paper (FL-GLM section 3.2) uses RSA; ``rsa-3072`` is RSA with OAEP. The default
``ml-kem-768-x25519`` is HPKE (RFC 9180) with a hybrid KEM that is also secure against quantum
computers.
"""

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import mlkem, padding, rsa, x25519
from cryptography.hazmat.primitives.hpke import (
    AEAD,
    KDF,
    KEM,
    MLKEM768X25519PrivateKey,
    MLKEM768X25519PublicKey,
    Suite,
)
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from split.protocol.errors import HandshakeError, Refusal
from split.protocol.tickets import Ticket

KeyExchange = Literal["ml-kem-768-x25519", "rsa-3072"]
SUITE_NUMBERS: dict[KeyExchange, int] = {"ml-kem-768-x25519": 1, "rsa-3072": 2}
WRAPPED_BYTES: dict[KeyExchange, int] = {"ml-kem-768-x25519": 1168, "rsa-3072": 384}
KEY_IDENTIFIER_BYTES = 32
WRAPPED_SECRET_BYTES = 32
MAC_BYTES = 32

_MLKEM_PUBLIC_BYTES = 1184
_PROTOCOL = b"chambers lane 3"
_LABEL = b"chambers lane 3 wrap"
_HPKE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_RSA_BITS = 3072
_RSA_EXPONENT = 65537


def known_suite(name: str) -> KeyExchange:
    """Return the suite with the given name; raise a HandshakeError if there is none."""
    for suite in SUITE_NUMBERS:
        if suite == name:
            return suite
    raise HandshakeError(Refusal.SUITE)


def key_identifier(suite: KeyExchange, public: bytes) -> bytes:
    """Return the 32 bytes that identify a server's key in a handshake."""
    return hashlib.sha256(bytes([SUITE_NUMBERS[suite]]) + public).digest()


def wrap(suite: KeyExchange, public: bytes, secret: bytes, context: bytes) -> bytes:
    """Encrypt a secret of 32 bytes to a server's public key (see ``ServerKeys.public``).

    The context is the preceding bytes of the message, which are also needed to decrypt the secret.
    Raise a HandshakeError if the public key does not belong to this suite.
    """
    try:
        if suite == "rsa-3072":
            key = serialization.load_der_public_key(public)
            if (
                not isinstance(key, rsa.RSAPublicKey)
                or key.key_size != _RSA_BITS
                or key.public_numbers().e != _RSA_EXPONENT
            ):
                raise HandshakeError(Refusal.SUITE)
            return key.encrypt(secret, _oaep(context))
        hybrid = MLKEM768X25519PublicKey(
            mlkem.MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_PUBLIC_BYTES]),
            x25519.X25519PublicKey.from_public_bytes(public[_MLKEM_PUBLIC_BYTES:]),
        )
        return _HPKE.encrypt(secret, hybrid, info=_LABEL + context)
    except (ValueError, UnsupportedAlgorithm):
        raise HandshakeError(Refusal.SUITE) from None


def _oaep(context: bytes) -> padding.OAEP:
    return padding.OAEP(
        mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=_LABEL + context
    )


class ServerKeys:
    """The server's current key pair. The private key is in memory only."""

    def __init__(self, suite: KeyExchange) -> None:
        self.suite: KeyExchange = suite
        self.rotate()

    @property
    def public(self) -> bytes:
        """Public key: 1,184 bytes for ML-KEM-768 and 32 for X25519, or RSA in DER (SPKI) format."""
        return self._key[1]

    def rotate(self) -> None:
        """Generate a new key pair and discard the old one."""
        if self.suite == "rsa-3072":
            private = rsa.generate_private_key(_RSA_EXPONENT, _RSA_BITS)
            public = private.public_key().public_bytes(
                serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
            )
            self._key: tuple[rsa.RSAPrivateKey | MLKEM768X25519PrivateKey, bytes] = private, public
            return
        kem, curve = mlkem.MLKEM768PrivateKey.generate(), x25519.X25519PrivateKey.generate()
        public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
        self._key = MLKEM768X25519PrivateKey(kem, curve), public

    def unwrap(self, identifier: bytes, wrapped: bytes, context: bytes) -> bytes:
        """Decrypt a secret that a client encrypted with ``wrap`` to the key with this identifier.

        Raise ``HandshakeError`` if the identifier is not that of the current key, or the secret
        can't be decrypted or was encrypted for a different message.
        """
        private, public = self._key  # read once, because another thread may rotate the key
        if not secrets.compare_digest(identifier, key_identifier(self.suite, public)):
            raise HandshakeError(Refusal.SERVER_KEY)
        try:
            if isinstance(private, rsa.RSAPrivateKey):
                secret = private.decrypt(wrapped, _oaep(context))
            else:
                secret = _HPKE.decrypt(wrapped, private, info=_LABEL + context)
        except (ValueError, InvalidTag):
            raise HandshakeError(Refusal.WRAPPED_SECRET) from None
        if len(secret) != WRAPPED_SECRET_BYTES:
            raise HandshakeError(Refusal.WRAPPED_SECRET)
        return secret


@dataclass(frozen=True)
class LaneSecrets:
    """Secrets that both sides have after a handshake."""

    up: bytes = field(repr=False)  # AES-256 key from client to server
    down: bytes = field(repr=False)  # AES-256 key from server to client
    resumption: Ticket = field(repr=False)  # ticket for the lane's next stream


class KeySchedule:
    """Derivation of a stream's keys from a handshake.

    Each key depends on the ephemeral X25519 secret, the secret that was encrypted to the server's
    key, the ticket's secret, and the hash of the handshake's bytes so far. A side that lacks one of
    these secrets, or received different bytes, derives different keys.
    """

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
