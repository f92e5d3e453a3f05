"""Clients who have a lane and mean harm take nothing from others."""

import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from split.client.split_model import ClientRound
from split.protocol.errors import PeerError
from split.protocol.frames import Kind
from tests.split.clients import SIZES, Client, serving, split_settings, train_together
from tests.split.lanes import SOON, Proxy, ended


class Dribble(Proxy):
    """Passes what goes up on a byte at a time, once it is told to."""

    slow = False

    def _pump(self, source, target, name):
        with suppress(OSError):
            while content := source.recv(65536):
                if name == "up" and self.slow:
                    for byte in content:
                        target.sendall(bytes([byte]))
                        time.sleep(0.05)
                else:
                    target.sendall(content)
        self.cut()


def test_a_frame_that_comes_a_byte_at_a_time_is_cut_by_the_frame_timeout(base, beginning):
    split = split_settings(frame_timeout=1.0)
    client = Client("alpha", base, split)
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        proxy = Dribble(server.address)
        invitation = server.invite_to_train("alpha", 1, 0, 60.0)
        with client.lane(replace(invitation, address=proxy.address)) as model:
            model.join(ClientRound(3, 0, 3, 16, 0, time.monotonic() + SOON))
            proxy.slow = True
            model.lane.send(Kind.HIDDEN, 0, 0, {"hidden": torch.zeros(2, 8, 32)})
            ended(model.lane, PeerError, r"split\.frame-timeout")
            proxy.cut()
        assert "split.frame-timeout" in server.finish_lanes()[0].error


def spoil(change):
    """Give what makes a client's frames what ``change`` makes of their numbers."""

    def disturb(model):
        send = model.lane.send

        def sending(kind, step=0, micro_batch=0, tensors=None, fields=None):
            send(kind, step, micro_batch, *change(kind, tensors or {}, fields or {}))

        model.lane.send = sending

    return disturb


def huge(kind_changed, value):
    def change(kind, tensors, fields):
        if kind is kind_changed:
            tensors = {
                n: torch.full_like(t, value) if t.is_floating_point() else t
                for n, t in tensors.items()
            }
        return tensors, fields

    return spoil(change)


def huge_norm(kind, tensors, fields):
    return tensors, fields | ({"squared_norm": 1e308} if kind is Kind.STEP else {})


SPOILT = {
    "huge hidden states": (huge(Kind.HIDDEN, 3e38), "beyond 2³⁰"),
    "huge gradients": (huge(Kind.GRADIENT, -3e38), "beyond 2³⁰"),
    "a huge norm": (spoil(huge_norm), "squared_norm"),
}


def train_beside(base, beginning, disturb):
    """Train a stack in which beta's frames are disturbed; give who finished, and accounts."""
    split = split_settings(schedule="client-batch")
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        steps = dict.fromkeys(SIZES, 3)
        trained = train_together(clients, server, beginning, steps, disturbing={"beta": disturb})
        accounts = {account.client: account for account in server.finish_lanes()}
        assert all(v.isfinite().all() for v in server.end_round(SIZES).values())
    return trained, accounts


@pytest.mark.parametrize("what", SPOILT)
def test_numbers_that_could_spoil_the_stack_end_their_lane_alone(base, beginning, what):
    """Without limits the stack's gradients would be NaN, and all its lanes would end."""
    disturb, reason = SPOILT[what]
    trained, accounts = train_beside(base, beginning, disturb)
    assert set(trained) == {"alpha", "gamma"}
    assert reason in accounts["beta"].error
    assert not accounts["alpha"].error and not accounts["gamma"].error


def test_the_largest_numbers_that_may_come_leave_the_stack_finite(base, beginning):
    def disturb(model):
        huge(Kind.HIDDEN, 2.0**30)(model)
        huge(Kind.GRADIENT, 2.0**30)(model)

    trained, accounts = train_beside(base, beginning, disturb)
    assert {"alpha", "gamma"} <= set(trained)
    assert not accounts["alpha"].error and not accounts["gamma"].error
