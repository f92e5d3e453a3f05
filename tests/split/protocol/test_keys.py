import functools

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from split.protocol.errors import HandshakeError, Refusal
from split.protocol.keys import WRAPPED_BYTES, ServerKeys, key_identifier, wrap

SUITES = ["ml-kem-768-x25519", "rsa-3072"]
SECRET, CONTEXT = bytes(range(32)), b"what comes before it"


@functools.cache
def keys_of(suite):
    return ServerKeys(suite)


def unwrap(keys, wrapped):
    return keys.unwrap(key_identifier(keys.suite, keys.public), wrapped, CONTEXT)


@pytest.mark.parametrize("suite", SUITES)
def test_a_wrapped_secret_is_opened(suite):
    keys = keys_of(suite)
    wrapped = wrap(suite, keys.public, SECRET, CONTEXT)
    assert len(wrapped) == WRAPPED_BYTES[suite]
    assert SECRET not in wrapped
    assert unwrap(keys, wrapped) == SECRET


def test_public_keys_have_the_documented_form():
    assert len(keys_of("ml-kem-768-x25519").public) == 1184 + 32
    public = serialization.load_der_public_key(keys_of("rsa-3072").public)
    assert isinstance(public, rsa.RSAPublicKey)
    assert public.key_size == 3072


@pytest.mark.parametrize("suite", SUITES)
def test_an_altered_secret_is_refused(suite):
    keys = keys_of(suite)
    wrapped = bytearray(wrap(suite, keys.public, SECRET, CONTEXT))
    for place in range(0, len(wrapped), 101):
        altered = bytes(wrapped[:place]) + bytes([wrapped[place] ^ 1]) + bytes(wrapped[place + 1 :])
        with pytest.raises(HandshakeError) as raised:
            unwrap(keys, altered)
        assert raised.value.refusal is Refusal.WRAPPED_SECRET


@pytest.mark.parametrize("suite", SUITES)
def test_a_secret_of_another_length_is_refused(suite):
    keys = keys_of(suite)
    with pytest.raises(HandshakeError):
        unwrap(keys, wrap(suite, keys.public, SECRET[:31], CONTEXT))


def test_after_a_rotation_the_old_key_is_refused_by_name():
    keys = ServerKeys("ml-kem-768-x25519")
    public, identifier = keys.public, key_identifier(keys.suite, keys.public)
    wrapped = wrap(keys.suite, public, SECRET, CONTEXT)
    keys.rotate()
    assert key_identifier(keys.suite, keys.public) != identifier
    with pytest.raises(HandshakeError, match="server's key has changed"):
        keys.unwrap(identifier, wrapped, CONTEXT)
    with pytest.raises(HandshakeError):
        unwrap(keys, wrapped)


def _der(bits, exponent=65537):
    return (
        rsa.generate_private_key(exponent, bits)
        .public_key()
        .public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


# A SubjectPublicKeyInfo of algorithm 1.2.3.4, which no library knows.
UNKNOWN_KEY = bytes.fromhex("300b300506032a030403020000")


@pytest.mark.parametrize(
    ("suite", "public"),
    [
        ("rsa-3072", b""),
        ("rsa-3072", b"\x30\x00"),
        ("rsa-3072", _der(1024)),
        ("rsa-3072", _der(3072, exponent=3)),
        ("rsa-3072", UNKNOWN_KEY),
        ("ml-kem-768-x25519", b""),
        ("ml-kem-768-x25519", bytes(1215)),
        ("ml-kem-768-x25519", b"\xff" * 1216),
    ],
)
def test_a_public_key_that_is_none_is_refused(suite, public):
    with pytest.raises(HandshakeError) as raised:
        wrap(suite, public, SECRET, CONTEXT)
    assert raised.value.refusal is Refusal.SUITE
