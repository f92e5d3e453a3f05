"""A client that was written from docs/wire.md alone does what ours does, bit for bit."""

import time
from contextlib import contextmanager

import pytest
import torch

from finetuning.training.loop import train_round
from split.model.adapters import load_state, take_apart
from split.model.cut import cut_of
from strategies.messages import lane_record
from tests.split.clients import (
    ADAPTER,
    LONGEST,
    STEPS,
    TRAIN,
    Client,
    draw,
    place_of,
    serving,
    split_settings,
)
from tests.split.protocol.test_handshake import VECTORS
from tests.split.protocol.test_records import UP, VECTOR
from tests.split.wire import handshake, records
from tests.split.wire import lane as lane_module
from tests.split.wire.lane import Lane
from tests.split.wire.model import WireModel
from tests.split.wire.stream import CutError, Stream

SUITES = ["ml-kem-768-x25519", "rsa-3072"]
WIRES = ["float32", "bfloat16", "int8"]
# So that nothing can be computed a second time without being noticed.
DROPOUT = ADAPTER.model_copy(update={"dropout": 0.3})


def invitation_of(made) -> handshake.Invitation:
    """Read what travels in a Flower message."""
    record = lane_record(made)
    return handshake.Invitation(
        address=record["address"],
        suite=record["suite"],
        server_key=record["server-key"],
        run=record["run"],
        round=record["round"],
        node=record["node"],
        ticket=handshake.Ticket(record["ticket"], record["secret"]),
    )


class WireClient(Client):
    """The test's client on the independent lane."""

    def __init__(self, *arguments, dial=Stream) -> None:
        super().__init__(*arguments)
        self._dial = dial

    @contextmanager
    def lane(self, invitation):
        lane = Lane(
            invitation_of(invitation),
            self.split.wire_dtype,
            deadline=time.monotonic() + 60,
            resume_timeout=self.split.resume_timeout,
            retry_seconds=0.05,
            dial=self._dial,
        )
        self.opened = lane
        yield WireModel(self.ends["head"], self.ends["tail"], lane)

    def train(self, server, state, steps=STEPS):
        examples, place = place_of(self.name, steps)
        with self.lane(server.invite_to_train(self.name, 1, place.seed, 60.0)) as model:
            load_state(model.parameters, {n: state[n] for n in model.parameters})
            longest = max(len(example.tokens) for example in examples)
            model.join(steps, STEPS, TRAIN.batch_size * longest)
            report, self.optimizer = train_round(model, model.parameters, examples, 0, place, TRAIN)
            model.end()
        self.losses = report.losses
        return {n: p.detach().clone() for n, p in model.parameters.items()}


def trained(base, beginning, split, steps, client):
    """Train a round; return losses, weights and moments, and the server's account."""
    with serving(base, beginning, split, DROPOUT) as server:
        server.begin_round({"alpha": 9}, 0)
        ends = client.train(server, beginning, steps)
        (account,) = server.finish_lanes()
        body = server.end_round({"alpha": 9})
    found = {"losses": torch.tensor(client.losses)} | client.optimizer | ends | body
    return found, account


def assert_equal(one, other) -> None:
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


@pytest.mark.parametrize("suite", SUITES)
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
        "transcript": handshake.hashlib.sha256(first + second + third).digest(),
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


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("suite", SUITES)
def test_it_trains_as_ours_does(base, beginning, suite, wire):
    split = split_settings(key_exchange=suite, wire_dtype=wire)
    expected, _ = trained(base, beginning, split, 2, Client("alpha", base, split, DROPOUT))
    found, account = trained(base, beginning, split, 2, WireClient("alpha", base, split, DROPOUT))
    assert_equal(found, expected)
    assert (account.steps, account.error) == (2, "")
