"""docs/wire-vectors.json matches our code and the client implemented only from docs/wire.md."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import hashes, hpke
from cryptography.hazmat.primitives.asymmetric import mlkem, padding
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_der_private_key

from tests.split.wire import handshake, records, write_vectors

VECTORS = json.loads(Path("docs/wire-vectors.json").read_text())
STREAMS = VECTORS["streams"]


def of(case, *names):
    return [bytes.fromhex(case[name]) for name in names]


def unwrap(case, front):
    """Open a wrapped secret with the server's private key."""
    private, label, (wrapped,) = case["server_private"], handshake.WRAP_LABEL, of(case, "wrapped")
    if case["suite"] == "rsa-3072":
        oaep = padding.OAEP(padding.MGF1(hashes.SHA256()), hashes.SHA256(), label + front)
        return load_der_private_key(*of(private, "pkcs8"), None).decrypt(wrapped, oaep)
    seed, curve = of(private, "ml-kem-768-seed", "x25519")
    key = hpke.MLKEM768X25519PrivateKey(
        mlkem.MLKEM768PrivateKey.from_seed_bytes(seed), X25519PrivateKey.from_private_bytes(curve)
    )
    suite = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)
    return suite.decrypt(wrapped, key, info=label + front)


def test_the_vectors_are_what_our_code_makes():
    rsa_key = STREAMS[-1]["server_private"]["pkcs8"]
    made = write_vectors.streams([case["wrapped"] for case in STREAMS], rsa_key)
    assert made == STREAMS
    assert write_vectors.payloads() == VECTORS["payloads"]


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["suite"])
def test_handshakes_and_keys_are_those_of_the_page(case):
    ticket = handshake.Ticket(*of(case, "ticket", "ticket_secret"))
    names = ("suite", "run", "round", "node")
    server_key, wrapped = of(case, "server_key", "wrapped")
    invitation = handshake.Invitation(
        address="", server_key=server_key, ticket=ticket, **{name: case[name] for name in names}
    )
    client, server = (
        X25519PrivateKey.from_private_bytes(private)
        for private in of(case, "client_private", "server_share_private")
    )
    identifier = hashlib.sha256(bytes([handshake.SUITES[case["suite"]]]) + server_key).digest()
    share = client.public_key().public_bytes_raw()
    front = handshake.hello_front(invitation, ticket, share, identifier)
    secret = unwrap(case, front)
    secrets = client.exchange(server.public_key()) + secret + ticket.secret
    first = handshake.write_hello(front, wrapped, ticket)
    second = handshake.prefix(2) + server.public_key().public_bytes_raw()
    second += handshake.finished(secrets, "server", first + second)
    third = handshake.prefix(3)
    third += handshake.finished(secrets, "client", first + second + third)
    keys = handshake.stream_secrets(secrets, first + second + third)
    resumption = keys.resumption
    found = [secret, first, second, third, keys.up, keys.down, *vars(resumption).values()]
    named = ("secret", "m1", "m2", "m3", "up", "down", "resumption_ticket", "resumption_secret")
    assert found == of(case, *named)


def test_a_lane_is_resumed_with_the_ticket_of_its_last_stream():
    first, second, _ = STREAMS
    assert second["ticket"] == first["resumption_ticket"]
    assert second["ticket_secret"] == first["resumption_secret"]


@pytest.mark.parametrize("case", STREAMS, ids=lambda case: case["suite"])
def test_records_are_those_of_the_page(case):
    keys = dict(zip(("up", "down"), of(case, "up", "down"), strict=True))
    sealers = {way: records.Sealer(key) for way, key in keys.items()}
    openers = {way: records.Opener(key) for way, key in keys.items()}
    for expected in case["frames"]:
        way = expected["direction"]
        payload, record = of(expected, "payload", "record")
        frame = openers[way].open(record)
        assert (frame.kind.name, frame.payload) == (expected["kind"], payload)
        assert frame.acknowledged == expected["acknowledged"]
        assert records.read_payload(payload)[1] == expected["fields"]
        assert sealers[way].seal(frame, frame.acknowledged) == [record]


@pytest.mark.parametrize("case", VECTORS["payloads"], ids=lambda case: case["wire_dtype"])
def test_hidden_states_in_each_wire_type_are_those_of_the_page(case):
    tensors, fields = records.read_payload(*of(case, "payload"))
    lengths = torch.tensor(case["lengths"], dtype=torch.int32)
    expected = records.to_wire(case["wire_dtype"], "hidden", torch.tensor(case["hidden"]))
    expected |= {"lengths": lengths}
    assert fields == case["fields"] and tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype and torch.equal(tensor, expected[name])
