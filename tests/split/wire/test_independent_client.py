"""A client that was implemented only from docs/wire.md equals ours, bit for bit."""

import functools
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
import torch

from federation.messages import lane_record
from finetuning.adapters.adapter import load_state
from finetuning.data.batching import collate
from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.settings import ModelSettings
from finetuning.training.loop import train_round
from split.model.adapters import take_apart
from split.model.loading import load_parts
from split.model.partition import partition_of
from split.protocol.standing_invitation import StandingInvitation
from split.server.model_server import ModelServer
from tests.split.clients import (
    ADAPTER,
    SIZES,
    STEPS,
    TRAIN,
    Client,
    draw,
    round_of,
    serving,
    split_settings,
    train_together,
)
from tests.split.wire import handshake
from tests.split.wire.lane import Lane
from tests.split.wire.model import WireModel
from tests.split.wire.stream import CutError, Stream

SUITES = ["ml-kem-768-x25519", "rsa-3072"]
WIRES = ["float32", "bfloat16", "int8"]
# So that nothing can be computed a second time without being noticed.
DROPOUT = ADAPTER.model_copy(update={"dropout": 0.3})


def read_record(made) -> handshake.Invitation:
    """Read an invitation from the record that a Flower message contains."""
    record = lane_record(made, {})
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
    """A test client that uses the independent implementation of lanes."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments)
        self._options = options  # of the lane

    @contextmanager
    def lane(self, invitation):
        lane = Lane(
            invitation if isinstance(invitation, handshake.Invitation) else read_record(invitation),
            self.split.wire_dtype,
            deadline=time.monotonic() + 60,
            resume_timeout=self.split.resume_timeout,
            retry_seconds=0.05,
            **self._options,
        )
        self.opened = lane
        yield WireModel(self.ends["head"], self.ends["tail"], lane, self.split.average_every)

    def train(self, server, state, steps=STEPS, train=TRAIN, disturb=None):
        examples, local_round = round_of(self.name, steps)
        with self.lane(server.invite_to_train(self.name, 1, local_round.seed, 60.0)) as model:
            load_state(model.parameters, {n: state[n] for n in model.parameters})
            longest = max(len(example.tokens) for example in examples)
            model.join(steps, STEPS, train.batch_size * longest)
            report, self.optimizer = train_round(
                model, model.parameters, examples, 0, local_round, train
            )
            model.end()
        self.losses = report.losses
        return {n: p.detach().clone() for n, p in model.parameters.items()}


def trained(base, beginning, split, steps, client):
    """Train a round; return losses, weights and optimizer moments, and the server's account."""
    with serving(base, beginning, split, DROPOUT) as server:
        server.begin_round({"alpha": 9}, 0)
        ends = client.train(server, beginning, steps)
        (account,) = server.finish_lanes()
        body = server.end_round({"alpha": 9})
    found = {"losses": torch.tensor(client.losses)} | client.optimizer | ends | body
    return found, account


@pytest.fixture(scope="module")
def ours(base, beginning):
    """Return a function that trains a round with our own client, once for each wire type."""

    @functools.cache
    def train(wire):
        split = split_settings(wire_dtype=wire)
        return trained(base, beginning, split, 2, Client("alpha", base, split, DROPOUT))[0]

    return train


def assert_equal(one, other) -> None:
    assert one.keys() == other.keys()
    assert not [n for n, value in one.items() if not torch.equal(value.cpu(), other[n].cpu())]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("suite", SUITES)
def test_it_trains_as_ours_does(base, beginning, ours, suite, wire):
    split = split_settings(key_exchange=suite, wire_dtype=wire)
    found, account = trained(base, beginning, split, 2, WireClient("alpha", base, split, DROPOUT))
    assert_equal(found, ours(wire))
    assert (account.steps, account.error) == (2, "")


def evaluated(base, beginning, split, client):
    """Evaluate and generate; return the results and all hidden states that the server sent."""
    parts = take_apart(beginning, partition_of(base, split))
    ends = parts["head"] | parts["tail"]
    batches = [collate(draw(17, 1)[i : i + 3], 0) for i in range(0, 17, 3)]
    tokens = torch.randint(2, 64, (3, 7), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(7) >= torch.tensor([[0], [3], [5]])
    contexts = [tokens[0], tokens[1, 3:]]
    groups = [[Continuation(c, tokens[2, n:]) for n in (5, 4, 6)] for c in contexts]
    # Some with endings, and one without.
    candidates = candidate_batches([*groups, groups[0][:1]], 0, 0, 60)
    found, hidden = {}, []
    with serving(base, beginning, split) as server:
        models = {"base": None, "global": parts["body"]}
        with client.lane(server.invite_to_evaluate("alpha", 0, models, 60.0)) as model:
            receive = model.lane.receive

            def receiving(timeout):
                frame = receive(timeout)
                hidden.extend(t for name, t in frame.tensors.items() if name == "hidden")
                return frame

            model.lane.receive = receiving
            for name, adapters in (("global", ends), ("base", None)):
                model.choose(name, adapters)
                found[f"{name}/losses"] = torch.tensor(model.summed_losses(batches))
                found[f"{name}/texts"] = model.generate(tokens, mask.long(), 5, **client.settings)
                for index, batch in enumerate(candidates):
                    found[f"{name}/{index}"], *_ = model.log_probabilities(batch)
            model.end()
        (account,) = server.finish_lanes()
    assert not account.error
    return found | {f"hidden/{index}": each for index, each in enumerate(hidden)}


@pytest.fixture(scope="module")
def ours_evaluated(base, beginning):
    """Return a function that evaluates with our own client, once for each wire type."""

    @functools.cache
    def evaluate(wire):
        split = split_settings(wire_dtype=wire)
        client = Client("alpha", base, split)
        client.settings = {"do_sample": False, "eos_token_id": None}
        return evaluated(base, beginning, split, client)

    return evaluate


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("suite", SUITES)
def test_it_evaluates_and_generates_as_ours_does(base, beginning, ours_evaluated, suite, wire):
    split = split_settings(key_exchange=suite, wire_dtype=wire)
    other = WireClient("alpha", base, split)
    other.settings = {}
    expected = ours_evaluated(wire)
    assert len([name for name in expected if name.startswith("hidden/")]) == 2 * (6 + 5 + 3)
    assert_equal(evaluated(base, beginning, split, other), expected)


def test_rejected_drafts_leave_no_trace(base, beginning):
    split = split_settings()
    client = WireClient("alpha", base, split)
    tokens, models = torch.tensor([[3, 4, 5], [0, 6, 7]]), {"base": None}
    texts = []
    with serving(base, beginning, split) as server:
        with client.lane(server.invite_to_evaluate("alpha", 0, models, 60.0)) as model:
            model.choose("base", None)
            for drafted in (0, 3):
                texts.append(model.generate(tokens, (tokens > 0).long(), 6, drafted=drafted))
            model.end()
        (account,) = server.finish_lanes()
    assert not account.error
    assert torch.equal(*texts)


class LossyNetwork:
    """Drops messages of a lane, counted over all streams, and cuts the stream of each.

    Args:
        up: Numbers of the client's messages that are dropped, from 0.
        down: Numbers of the server's messages that are dropped.

    """

    def __init__(self, up=(), down=()) -> None:
        self.lost = {"up": set(up), "down": set(down)}
        self.count = {"up": 0, "down": 0}

    def loses(self, direction: str) -> bool:
        number = self.count[direction]
        self.count[direction] += 1
        return number in self.lost[direction]

    def dial(self, address, deadline):
        network = self

        class LossyStream(Stream):
            def send(self, message):
                if network.loses("up"):
                    self.close()
                else:
                    super().send(message)

            def receive(self, timeout):
                message = super().receive(timeout)
                if network.loses("down"):
                    self.close()
                    raise CutError("lost")
                return message

        return LossyStream(address, deadline)


# Where nothing is lost, the client sends M1, M3, CONFIRM and JOIN; three HIDDEN, three GRADIENT and
# a STEP for each step; END and CLOSE. The server sends M2, CONFIRM and WELCOME, and so on.
LOSSES = {
    "M1, M2, M3 and CONFIRM down, one after another": {"up": [0, 2], "down": [1, 3]},
    "CONFIRM up": {"up": [2]},
    "much": {"up": [3, 9, 15, 21], "down": [2, 7, 12, 18, 24]},
    "END up, CONFIRM down, END down": {"up": [18], "down": [18, 21]},
    "CLOSE": {"up": [19]},
}


@pytest.mark.parametrize("losses", LOSSES)
def test_a_lane_that_is_cut_continues_as_if_it_had_not_been(base, beginning, ours, losses):
    number = list(LOSSES).index(losses)
    suite, wire = SUITES[number % 2], WIRES[number % 3]
    split = split_settings(key_exchange=suite, wire_dtype=wire)
    network = LossyNetwork(**LOSSES[losses])
    client = WireClient("alpha", base, split, DROPOUT, dial=network.dial)
    found, account = trained(base, beginning, split, 2, client)
    assert_equal(found, ours(wire))
    assert (account.steps, account.error) == (2, "")
    assert all(network.count[way] > max(lost, default=0) for way, lost in network.lost.items())


def test_it_averages_within_a_round_with_one_of_ours(base, beginning):
    split = split_settings(schedule="hierarchical", average_every=1)
    results = []
    for other in (Client, WireClient):
        clients = [Client("alpha", base, split), other("beta", base, split)]
        with serving(base, beginning, split) as server:
            server.begin_round({name: SIZES[name] for name in ("alpha", "beta")}, 0)
            ends = train_together(clients, server, beginning, {"alpha": 3, "beta": 3})
            server.finish_lanes()
            results.append(ends["alpha"] | {f"beta/{n}": v for n, v in ends["beta"].items()})
    assert_equal(*results)


@pytest.mark.parametrize("suite", SUITES)
def test_it_generates_with_a_served_model_by_its_invitation_file(base, beginning, tmp_path, suite):
    split = split_settings(key_exchange=suite)
    partition = partition_of(base, split)
    parts = take_apart(beginning, partition)
    body = load_parts(ModelSettings(dtype="float32"), base, partition, ("body",))["body"]
    tokens, mask = torch.arange(2, 9)[None], torch.ones(1, 7, dtype=torch.int64)
    server, texts = ModelServer(body, ADAPTER, split, "run", max_prompt_length=7), []
    try:
        made = server.invite("alpha", {"global": parts["body"]}, 60.0)
        standing = StandingInvitation(
            address=made.address,
            suite=made.suite,
            server_key=made.server_key,
            run=made.identity.run,
            client="alpha",
            ticket=made.ticket.identifier,
            secret=made.ticket.secret,
            expires=datetime.now(UTC) + timedelta(minutes=1),
            model=str(base),
            digests={},
            blocks=partition.blocks,
            head_blocks=partition.head,
            tail_blocks=partition.tail,
            wire_dtype=split.wire_dtype,
            max_tokens=split.activation_budget,
            max_prompt_length=7,
            models={"global": ""},
        )
        (tmp_path / "alpha.json").write_text(standing.model_dump_json())
        read = handshake.Invitation.read(tmp_path / "alpha.json")
        for kind, invitation, settings in (
            (Client, made, {"do_sample": False, "eos_token_id": None}),
            (WireClient, read, {}),
            (WireClient, read, {}),  # a standing ticket is good for more than one lane
        ):
            with kind("alpha", base, split).lane(invitation) as model:
                model.choose("global", parts["head"] | parts["tail"])
                texts.append(model.generate(tokens, mask, 4, **settings))
                model.end()
    finally:
        server.stop()
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])
