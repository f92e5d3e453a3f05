"""Clients that are silent while they occupy server memory for which other clients wait."""

import time
from contextlib import ExitStack, contextmanager

import pytest
import torch

from split.protocol.errors import PeerError
from split.protocol.frames import Kind
from split.protocol.training import RoundPlan
from tests.split.clients import Client, send_texts, serving, split_settings
from tests.split.lanes import SOON, ended

NAMES = ("alpha", "beta")


@contextmanager
def generating(base, beginning, lifetime=60.0, **timeouts):
    """Yield two clients of a server with memory for only one generation."""
    split = split_settings(activation_budget=100, **timeouts)
    clients = [Client(name, base, split) for name in NAMES]
    with serving(base, beginning, split) as server, ExitStack() as lanes:
        models = []
        for client in clients:
            invitation = server.invite_to_evaluate(client.name, 0, {"base": None}, lifetime)
            models.append(lanes.enter_context(client.lane(invitation)))
            models[-1].choose("base", None)
        yield models


@contextmanager
def training(base, beginning, **timeouts):
    """Yield two clients of a server with memory for only one micro-batch."""
    split = split_settings(schedule="hierarchical", activation_budget=20, **timeouts)
    clients = [Client(name, base, split) for name in NAMES]
    with serving(base, beginning, split) as server, ExitStack() as lanes:
        server.begin_round(dict.fromkeys(NAMES, 9), 0)
        models = []
        for client in clients:
            invitation = server.invite_to_train(client.name, 1, 0, 60.0)
            models.append(lanes.enter_context(client.lane(invitation)))
            models[-1].join(RoundPlan(3, 0, 3, 0), 16, time.monotonic() + SOON)
        yield models


def send_rows(model):
    """Send the first micro-batch of a step."""
    tensors = {"hidden": torch.zeros(2, 8, 32), "lengths": torch.tensor([8, 8])}
    counts = {"targets": 3, "step_targets": 3, "micro_batches": 1, "side": "right"}
    model.lane.send(Kind.HIDDEN, 0, 0, tensors, counts)


@pytest.mark.parametrize(
    "how", [(generating, send_texts), (training, send_rows)], ids=["generation", "training"]
)
def test_a_silent_client_does_not_hold_what_others_wait_for(base, beginning, how):
    using, begin = how
    with using(base, beginning, gather_timeout=2.0) as (silent, other):
        begin(silent)
        assert silent.lane.receive(SOON).kind is Kind.HIDDEN
        begin(other)
        assert other.lane.receive(2 * SOON).kind is Kind.HIDDEN
        ended(silent.lane, PeerError, r"waited .* that alpha occupies \(split\.gather-timeout")


@pytest.mark.parametrize(
    ("pause", "limit", "reason"),
    [
        (1.5, {"frame_timeout": 3.0}, r"split\.frame-timeout"),
        (0.4, {"frame_timeout": 3.0}, r"split\.frame-timeout"),
        (0.4, {"lifetime": 5.0}, "half of round-timeout"),
    ],
)
def test_slow_tokens_hold_it_no_longer_than_a_silence(base, beginning, pause, limit, reason):
    with generating(base, beginning, **limit) as (slow, other):
        send_texts(slow)
        slow.lane.receive(SOON)
        send_texts(other)
        with pytest.raises(PeerError, match=reason):
            for index in range(1, 12):
                time.sleep(pause)
                send_texts(slow, rows=3, columns=1, new_tokens=None, index=index)
                slow.lane.receive(SOON)
        assert other.lane.receive(SOON).kind is Kind.HIDDEN
