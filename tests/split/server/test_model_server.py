"""The server of trained models: standing tickets, one lane per client, and the server's stop."""

import time
from contextlib import ExitStack, contextmanager

import pytest
import torch

from finetuning.data.batching import collate
from finetuning.settings import ModelSettings
from split.lane.transport import PeerLimits
from split.model.loading import load_parts
from split.model.partition import partition_of
from split.protocol.errors import HandshakeError, PeerError
from split.server.model_server import ModelServer
from tests.split.clients import LONGEST, assert_nothing_is_left, draw
from tests.split.model.test_generation import GREEDY, Scene, generated
from tests.split.server.test_session import busy


class Served(Scene):
    """A scene whose body is served for generation."""

    @contextmanager
    def model_server(self, peers=None):
        partition = partition_of(self.directory, self.split)
        parts = load_parts(ModelSettings(dtype="float32"), self.directory, partition, ("body",))
        server = ModelServer(
            parts["body"], self.adapter, self.split, "run", max_prompt_length=20, peers=peers
        )
        try:
            yield server
        finally:
            server.stop()
        assert_nothing_is_left()

    def invite(self, server, client, lifetime=60.0):
        return server.invite(client.name, {"base": None, "global": self.parts["body"]}, lifetime)


@pytest.fixture
def scene(random_checkpoint) -> Served:
    return Served(random_checkpoint("Llama"), activation_budget=LONGEST)


def test_a_newer_lane_displaces_only_the_same_clients_older_lane(scene):
    expected = generated(scene.whole(), **GREEDY)
    alpha, again, beta = (scene.client(name) for name in ("alpha", "alpha", "beta"))
    with scene.model_server() as server:
        invitation = scene.invite(server, alpha)
        with (
            beta.lane(scene.invite(server, beta)) as other,
            alpha.lane(invitation) as old,
            again.lane(invitation) as new,
        ):
            scene.choose(new)
            with pytest.raises(PeerError, match="another lane was opened with this invitation"):
                scene.choose(old)
            for model in (new, other):
                scene.choose(model)
                assert torch.equal(generated(model, **GREEDY), expected)


def test_displaced_lanes_count_until_the_current_job_has_ended(scene):
    with (
        scene.model_server(PeerLimits(lanes_of_one_identity=2)) as server,
        ExitStack() as lanes,
    ):
        alpha, beta = scene.client("alpha"), scene.client("beta")
        invitation = scene.invite(server, alpha)
        with busy(server):
            for _ in range(2):
                lanes.enter_context(alpha.lane(invitation))
            with pytest.raises(HandshakeError, match="no more lanes"):
                lanes.enter_context(alpha.lane(invitation, busy_until=time.monotonic()))
            lanes.enter_context(beta.lane(scene.invite(server, beta)))
        lanes.enter_context(alpha.lane(invitation))


@pytest.mark.nightly
def test_lanes_end_when_their_invitation_expires(scene):
    client = scene.client()
    with scene.model_server() as server:
        # Time enough to open the lane and to use it once.
        invitation = scene.invite(server, client, lifetime=5.0)
        with client.lane(invitation) as model:
            scene.choose(model)
            with pytest.raises(PeerError, match="the invitation has expired"):
                while True:  # until the lane's own deadline
                    time.sleep(0.1)
                    scene.choose(model)
        with pytest.raises(HandshakeError, match="expired"), client.lane(invitation):
            pass


def test_what_a_served_model_does_not_allow_ends_one_lane(scene):
    client = scene.client()
    with scene.model_server() as server:
        invitation = scene.invite(server, client)
        with (
            client.lane(invitation) as model,
            pytest.raises(PeerError, match="is not one of the models to evaluate: base, global"),
        ):
            model.choose("personalised", None)
        with client.lane(invitation) as model:
            scene.choose(model)
            refusal = f"at most {LONGEST} tokens in total were agreed on"
            with pytest.raises(PeerError, match=refusal):
                model.generate(torch.ones(3, 11).long(), torch.ones(3, 11).long(), 99)
        with client.lane(invitation) as model:
            scene.choose(model)
            longest = torch.full((1, 20), 5), torch.ones(1, 20).long(), 12
            drafts = {"prompt_lookup_num_tokens": 8}  # in the frame of the prompt
            text = model.generate(*longest, pad_token_id=0, **GREEDY, **drafts)
            assert torch.equal(text, scene.whole().generate(*longest, pad_token_id=0, **GREEDY))
            with pytest.raises(PeerError, match="rows of 53 tokens; at most 52 were agreed on"):
                model.generate(torch.ones(1, 53).long(), torch.ones(1, 53).long(), 1)
        with client.lane(invitation) as model:
            scene.choose(model)
            with pytest.raises(PeerError, match="padded tokens; at most 0 were agreed on"):
                model.summed_losses([collate(draw(1, 7), 0)])
        with client.lane(invitation) as model:
            scene.choose(model)
            generated(model, **GREEDY)
