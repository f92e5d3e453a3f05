"""The server's key of a period, and the secret that clients wrap to it (FL-GLM section 3.2).

The paper encrypts with RSA. ``rsa-3072`` keeps to that, with OAEP; the default
``ml-kem-768-x25519`` is HPKE (RFC 9180) with a hybrid that a quantum computer does not open either.
"""

import hashlib
import secrets
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

from split.protocol.errors import Refusal, refused

KeyExchange = Literal["ml-kem-768-x25519", "rsa-3072"]
SUITE_NUMBERS: dict[KeyExchange, int] = {"ml-kem-768-x25519": 1, "rsa-3072": 2}
WRAPPED_BYTES: dict[KeyExchange, int] = {"ml-kem-768-x25519": 1168, "rsa-3072": 384}
KEY_IDENTIFIER_BYTES = 32
SECRET_BYTES = 32

_MLKEM_PUBLIC_BYTES = 1184
_LABEL = b"chambers lane 3 wrap"
_HPKE = Suite(KEM.MLKEM768_X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_RSA_BITS = 3072
_RSA_EXPONENT = 65537


def known_suite(name: str) -> KeyExchange:
    """Return the suite of a name.

    Raises:
        HandshakeError: There is no such suite.

    """
    for suite in SUITE_NUMBERS:
        if suite == name:
            return suite
    raise refused(Refusal.SUITE)


def key_identifier(suite: KeyExchange, public: bytes) -> bytes:
    """Return the 32 bytes by which a handshake names a server's key."""
    return hashlib.sha256(bytes([SUITE_NUMBERS[suite]]) + public).digest()


def wrap(suite: KeyExchange, public: bytes, secret: bytes, context: bytes) -> bytes:
    """Encrypt a secret so that only the server of a public key can read it.

    Args:
        suite: Suite of the key.
        public: The key, in the form of ``ServerKeys.public``.
        secret: 32 bytes.
        context: Bytes before it in the message; the same bytes are needed to open it.

    Raises:
        HandshakeError: The public key is not one of this suite.

    """
    try:
        if suite == "rsa-3072":
            key = serialization.load_der_public_key(public)
            if (
                not isinstance(key, rsa.RSAPublicKey)
                or key.key_size != _RSA_BITS
                or key.public_numbers().e != _RSA_EXPONENT
            ):
                raise refused(Refusal.SUITE)
            return key.encrypt(secret, _oaep(context))
        hybrid = MLKEM768X25519PublicKey(
            mlkem.MLKEM768PublicKey.from_public_bytes(public[:_MLKEM_PUBLIC_BYTES]),
            x25519.X25519PublicKey.from_public_bytes(public[_MLKEM_PUBLIC_BYTES:]),
        )
        return _HPKE.encrypt(secret, hybrid, info=_LABEL + context)
    except (ValueError, UnsupportedAlgorithm):
        raise refused(Refusal.SUITE) from None


def _oaep(context: bytes) -> padding.OAEP:
    return padding.OAEP(
        mgf=padding.MGF1(hashes.SHA256()), algorithm=hashes.SHA256(), label=_LABEL + context
    )


class _HybridKey:
    """A period's ML-KEM-768 and X25519 key pair."""

    def __init__(self) -> None:
        kem, curve = mlkem.MLKEM768PrivateKey.generate(), x25519.X25519PrivateKey.generate()
        self._private = MLKEM768X25519PrivateKey(kem, curve)
        self.public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        return _HPKE.decrypt(wrapped, self._private, info=_LABEL + context)


class _RsaKey:
    """A period's RSA key pair."""

    def __init__(self) -> None:
        self._private = rsa.generate_private_key(_RSA_EXPONENT, _RSA_BITS)
        self.public = self._private.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        return self._private.decrypt(wrapped, _oaep(context))


class ServerKeys:
    """The server's key pair of the current period; the private half is in memory only.

    Args:
        suite: The kind of key.

    """

    def __init__(self, suite: KeyExchange) -> None:
        self.suite: KeyExchange = suite
        self.rotate()

    @property
    def public(self) -> bytes:
        """The public key: ML-KEM-768's 1,184 bytes and X25519's 32, or RSA's in DER (SPKI)."""
        return self._key.public

    @property
    def identifier(self) -> bytes:
        """The 32 bytes by which clients name it."""
        return key_identifier(self.suite, self.public)

    def rotate(self) -> None:
        """Begin a new period: make a new key and forget the old one."""
        self._key = _RsaKey() if self.suite == "rsa-3072" else _HybridKey()

    def unwrap(self, identifier: bytes, wrapped: bytes, context: bytes) -> bytes:
        """Open a secret that a client wrapped.

        Args:
            identifier: Identifier of the key that it was wrapped to.
            wrapped: The wrapped secret, as returned by ``wrap``.
            context: Bytes before it in the message.

        Returns:
            The secret, 32 bytes.

        Raises:
            ServerKeyError: It is not the key of this period.
            HandshakeError: It can't be opened, or was wrapped for another message.

        """
        key = self._key  # once: another thread may rotate it meanwhile
        if not secrets.compare_digest(identifier, key_identifier(self.suite, key.public)):
            raise refused(Refusal.SERVER_KEY)
        try:
            secret = key.unwrap(wrapped, context)
        except (ValueError, InvalidTag):
            raise refused(Refusal.WRAPPED_SECRET) from None
        if len(secret) != SECRET_BYTES:
            raise refused(Refusal.WRAPPED_SECRET)
        return secret
