"""The cryptographic library, used as in the protocol, reproduces published test vectors.

``vectors/known_answers.json`` names the source of each vector. There are no vectors for our suites
as a whole. Therefore, their parts are implemented here from RFC 9180, RFC 8017 and
draft-connolly-cfrg-xwing-kem, checked with the vectors, and then compared with our code.
"""

import hashlib
import hmac
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import mlkem
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from split.protocol.errors import HandshakeError, Refusal
from split.protocol.handshake import agree
from split.protocol.keys import ServerKeys, authenticate, wrap

FILE = Path(__file__).parent / "vectors" / "known_answers.json"
SECRET, CONTEXT = bytes(range(32)), b"what comes before it"
INFO = b"chambers lane 3 wrap" + CONTEXT
OUR_HPKE = (0x647A, 1, 2)
X_WING_LABEL = bytes.fromhex("5c2e2f2f5e5c")
AEADS = {2: AESGCM, 3: ChaCha20Poly1305}


def known(kind):
    """Return the vectors of a kind, byte strings decoded."""

    def decoded(name, value):
        return bytes.fromhex(value) if isinstance(value, str) and name != "name" else value

    vectors = json.loads(FILE.read_text())[kind]["vectors"]
    read = [{name: decoded(name, value) for name, value in each.items()} for each in vectors]
    return pytest.mark.parametrize("known", read, ids=lambda each: each["name"])


@known("x25519")
def test_shares_are_x25519_and_a_secret_of_zeros_is_refused(known):
    private = X25519PrivateKey.from_private_bytes(known["private"])
    if known["shared"] is not None:
        assert agree(private, known["public"]) == known["shared"]
        return
    with pytest.raises(HandshakeError) as raised:
        agree(private, known["public"])
    assert raised.value.refusal is Refusal.MALFORMED


@known("hmac_sha_256")
def test_messages_are_authenticated_with_hmac_sha_256(known):
    assert authenticate(known["key"], known["message"]) == known["mac"]


def schedule(suite, shared, info):
    """Return key and nonce of RFC 9180 section 5.1, in base mode."""
    identifier = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in suite)

    def extract(salt, label, secret):
        return hmac.digest(salt, b"HPKE-v1" + identifier + label + secret, "sha256")

    def expand(secret, label, context, size):
        labelled = size.to_bytes(2, "big") + b"HPKE-v1" + identifier + label + context
        return hmac.digest(secret, labelled + b"\1", "sha256")[:size]

    context = b"\0" + extract(b"", b"psk_id_hash", b"") + extract(b"", b"info_hash", info)
    secret = extract(shared, b"secret", b"")
    return expand(secret, b"key", context, 32), expand(secret, b"base_nonce", context, 12)


def x_wing_keys(seed):
    """Return the key pairs of the draft's ``expandDecapsulationKey``."""
    expanded = hashlib.shake_256(seed).digest(96)
    kem = mlkem.MLKEM768PrivateKey.from_seed_bytes(expanded[:64])
    return kem, X25519PrivateKey.from_private_bytes(expanded[64:])


def x_wing_secret(kem, curve, encapsulated):
    """Return the secret of the draft's ``Decapsulate``."""
    ciphertext, share = encapsulated[:1088], encapsulated[1088:]
    parts = kem.decapsulate(ciphertext), curve.exchange(X25519PublicKey.from_public_bytes(share))
    public = curve.public_key().public_bytes_raw()
    return hashlib.sha3_256(b"".join(parts) + share + public + X_WING_LABEL).digest()


@known("hpke")
def test_what_is_written_down_here_is_hpke(known):
    suite = tuple(known[name] for name in ("kem", "kdf", "aead"))
    key, nonce = schedule(suite, known["shared_secret"], known["info"])
    assert (key, nonce) == (known["key"], known["base_nonce"])
    opened = AEADS[known["aead"]](key).decrypt(nonce, known["ciphertext"], known["aad"])
    assert opened == known["plaintext"]
    if known["kem"] == OUR_HPKE[0]:
        kem, curve = x_wing_keys(known["skRm"])
        public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
        assert public == known["pkRm"]
        assert x_wing_secret(kem, curve, known["enc"]) == known["shared_secret"]


def test_the_hybrid_suite_is_hpke_with_x_wing():
    kem, curve = x_wing_keys(bytes(32))
    public = kem.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()
    wrapped = wrap("ml-kem-768-x25519", public, SECRET, CONTEXT)
    key, nonce = schedule(OUR_HPKE, x_wing_secret(kem, curve, wrapped[:1120]), INFO)
    assert AESGCM(key).decrypt(nonce, wrapped[1120:], b"") == SECRET


def mask(seed, size):
    """Return MGF1-SHA-256, RFC 8017 section B.2.1."""
    blocks = (hashlib.sha256(seed + i.to_bytes(4, "big")).digest() for i in range(size // 32 + 1))
    return b"".join(blocks)[:size]


def without(masked, seed):
    return bytes(a ^ b for a, b in zip(masked, mask(seed, len(masked)), strict=True))


def open_oaep(modulus, exponent, ciphertext, label):
    """Return the message of RSAES-OAEP with SHA-256, RFC 8017 section 7.1.2."""
    number = pow(int.from_bytes(ciphertext, "big"), exponent, modulus)
    padded = number.to_bytes((modulus.bit_length() + 7) // 8, "big")
    seed, block = padded[1:33], padded[33:]
    block = without(block, without(seed, block))
    assert padded[0] == 0 and block[:32] == hashlib.sha256(label).digest()
    zeros, _, message = block[32:].partition(b"\1")
    assert not any(zeros)
    return message


@known("rsa_oaep_sha_256")
def test_what_is_written_down_here_is_oaep(known):
    modulus, exponent = (int.from_bytes(known[n], "big") for n in ("modulus", "private_exponent"))
    assert open_oaep(modulus, exponent, known["ciphertext"], b"") == known["message"]


def test_the_other_suite_is_rsa_oaep():
    server = ServerKeys("rsa-3072")
    wrapped = wrap("rsa-3072", server.public, SECRET, CONTEXT)
    numbers = server._key[0].private_numbers()
    assert open_oaep(numbers.public_numbers.n, numbers.d, wrapped, INFO) == SECRET
