"""The client that was written from docs/wire.md alone agrees with the page's test vectors."""

import ast
import hashlib
from pathlib import Path

import pytest

from tests.split.protocol.test_handshake import VECTORS
from tests.split.protocol.test_records import UP, VECTOR
from tests.split.wire import handshake, records


@pytest.mark.parametrize("module", ["handshake", "records", "stream", "lane"])
def test_it_shares_no_code_with_split(module):
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    imported = [n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    imported += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert not [name for name in imported if name.partition(".")[0] == "split"]


@pytest.mark.parametrize("suite", VECTORS)
def test_the_key_schedule_is_that_of_the_vectors(suite):
    key_identifier, share = bytes(range(32, 64)), bytes(range(32))
    ticket = handshake.Ticket(bytes(range(16)), bytes([0x33]) * 32)
    invitation = handshake.Invitation("", suite, b"", "run", 7, "court", ticket)
    wrapped = bytes(i % 251 for i in range(384 if suite == "rsa-3072" else 1168))
    first = handshake.write_hello(invitation, ticket, share, key_identifier, wrapped)
    secrets = bytes([0x11]) * 32 + bytes([0x22]) * 32 + ticket.secret
    second = handshake.prefix(2) + bytes(range(64, 96))
    second += handshake.finished(secrets, "server", first + second)
    third = handshake.prefix(3)
    third += handshake.finished(secrets, "client", first + second + third)
    keys = handshake.stream_secrets(secrets, first + second + third)
    found = {
        "hello_mac": first[-32:],
        "server_finished": second[-32:],
        "client_finished": third[-32:],
        "transcript": hashlib.sha256(first + second + third).digest(),
        "up": keys.up,
        "down": keys.down,
        "resumption_identifier": keys.resumption.identifier,
        "resumption_secret": keys.resumption.secret,
    }
    assert {name: value.hex() for name, value in found.items()} == VECTORS[suite]


def test_records_are_those_of_the_vector():
    sealer, opener = records.Sealer(UP), records.Opener(UP)
    for expected in VECTOR:
        frame = opener.open(bytes.fromhex(expected))
        assert (frame.kind, frame.step, frame.micro_batch) == (records.Kind.STEP, 5, 6)
        assert frame.acknowledged == 9
        assert records.read_payload(frame.payload) == ({}, {"x": 1})
        assert [record.hex() for record in sealer.seal(frame, 9)] == [expected]
