"""A run whose lanes are cut and resumed equals a run without cuts, bit for bit."""

import socket
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from split.protocol.frames import Kind
from split.protocol.training import RoundPlan
from tests.marks import nightly
from tests.split.clients import (
    ADAPTER,
    SIZES,
    Client,
    assert_nothing_is_left,
    serving,
    split_settings,
    stop_after,
    train_together,
)
from tests.split.lanes import Proxy, cut

# So that nothing can be computed a second time without being noticed.
DROPOUT = ADAPTER.model_copy(update={"dropout": 0.3})


def cut_at(places, late=()):
    """Return a function that cuts the network under a lane.

    Places are (step, kind of frame, "before" or "after"), in order: before the frame is sent, or
    after it has been answered. Frames whose (step, kind) is in ``late`` are sent late.
    """
    left = list(places)

    def disturb(model) -> None:
        send = model.lane.send

        def sending(kind, step=0, micro_batch=0, tensors=None, fields=None):
            if (step, kind) in late:
                time.sleep(1.5)
            if left and left[0] == (step, kind, "before"):
                left.pop(0)
                cut(model.lane)
            send(kind, step, micro_batch, tensors, fields)
            if left and left[0] == (step, kind, "after"):
                left.pop(0)
                time.sleep(0.3)
                cut(model.lane)

        model.lane.send = sending

    disturb.left = left
    return disturb


def run(base, beginning, split, steps, disturbing):
    """Train a round; return all weights, optimizer moments and losses, and the lanes' accounts."""
    clients = [Client(name, base, split, DROPOUT) for name in steps]
    with serving(base, beginning, split, DROPOUT) as server:
        server.begin_round({name: SIZES[name] for name in steps}, 0)
        trained = train_together(clients, server, beginning, steps, {}, disturbing)
        accounts = {account.client: account for account in server.finish_lanes()}
        assert trained.keys() == steps.keys(), accounts
        found = {f"{c}/{n}": v for c in trained for n, v in server.state_of(c).items()}
        found |= server.end_round({name: SIZES[name] for name in steps})
    for client in clients:
        found |= {f"{client.name}/{n}": v for n, v in trained[client.name].items()}
        found |= {f"{client.name}/{n}": v for n, v in client.optimizer.items()}
        found[f"{client.name}/losses"] = torch.tensor(client.losses)
    assert_nothing_is_left()
    return found, accounts


def assert_equal(one, other) -> None:
    assert one.keys() == other.keys()
    assert not [name for name, value in one.items() if not torch.equal(value, other[name])]


PLACES = [
    (0, Kind.JOIN, "before"),
    (0, Kind.JOIN, "after"),
    (0, Kind.HIDDEN, "before"),
    (1, Kind.GRADIENT, "before"),
    (2, Kind.STEP, "before"),
    (3, Kind.HIDDEN, "after"),
    (4, Kind.GRADIENT, "after"),
    (5, Kind.STEP, "after"),
    (0, Kind.END, "before"),
    (0, Kind.END, "after"),
]


@pytest.mark.parametrize("schedule", ["serial", nightly("hierarchical"), "client-batch"])
def test_a_lane_that_is_cut_goes_on_as_if_it_had_not_been(base, beginning, schedule):
    split = split_settings(schedule=schedule)
    disturb = cut_at(PLACES)
    expected, _ = run(base, beginning, split, {"alpha": 7}, {})
    found, accounts = run(base, beginning, split, {"alpha": 7}, {"alpha": disturb})
    assert not disturb.left
    assert_equal(found, expected)
    account = accounts["alpha"]
    assert (account.steps, account.error) == (7, "")
    assert len(PLACES) >= account.resumed >= len(PLACES) // 2  # one may cut a stream that was cut


CUTS = {
    "beta": [
        (0, Kind.HIDDEN, "before"),
        (1, Kind.HIDDEN, "after"),
        (2, Kind.GRADIENT, "before"),
        (3, Kind.GRADIENT, "after"),
        (4, Kind.STEP, "before"),
        (5, Kind.STEP, "after"),
    ],
    "gamma": [
        (1, Kind.STEP, "before"),
        (2, Kind.GRADIENT, "after"),
        (4, Kind.STEP, "after"),
        (0, Kind.END, "after"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, nightly(4)])
def test_a_stack_waits_for_a_member_that_comes_back(base, beginning, window):
    split = split_settings(schedule="client-batch", window=window)
    steps = {"alpha": 7, "beta": 7, "gamma": 5}
    disturbing = {name: cut_at(places) for name, places in CUTS.items()}
    expected, _ = run(base, beginning, split, steps, {})
    found, accounts = run(base, beginning, split, steps, disturbing)
    assert not any(disturb.left for disturb in disturbing.values())
    assert_equal(found, expected)
    assert {name: a.steps for name, a in accounts.items()} == steps
    assert not [a.error for a in accounts.values() if a.error]


def test_a_stack_waits_no_longer_than_for_one_that_is_silent(base, beginning):
    """With a gather-timeout that is shorter than the resume-timeout."""
    split = split_settings(schedule="client-batch", gather_timeout=1.0, resume_timeout=60.0)
    clients = [Client(name, base, split) for name in SIZES]
    started = time.monotonic()
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        disturbing = {"beta": stop_after(2, 1, "cut")}
        steps = dict.fromkeys(SIZES, 4)
        trained = train_together(clients, server, beginning, steps, {}, disturbing)
        accounts = {account.client: account for account in server.finish_lanes()}
    assert trained.keys() == {"alpha", "gamma"}
    assert "split.gather-timeout" in accounts["beta"].error
    assert time.monotonic() - started < 40
    assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("late", [nightly("beta"), "gamma"])
def test_an_average_counts_once_whenever_a_lane_is_cut_in_it(base, beginning, late, when):
    """Beta is cut, before the others or when all wait for it, and alpha is, too."""
    split = split_settings(schedule="hierarchical", average_every=2)
    steps = {"alpha": 5, "beta": 6, "gamma": 5}
    places = {
        "alpha": [(2, Kind.AVERAGE, "after"), (4, Kind.STEP, "before")],
        "beta": [(2, Kind.AVERAGE, when), (4, Kind.AVERAGE, when), (4, Kind.STEP, "before")],
        "gamma": [],
    }
    disturbing = {
        name: cut_at(places[name], [(2, Kind.AVERAGE)] if name == late else []) for name in steps
    }
    expected, _ = run(base, beginning, split, steps, {})
    found, accounts = run(base, beginning, split, steps, disturbing)
    assert not any(disturb.left for disturb in disturbing.values())
    assert_equal(found, expected)
    assert not [a.error for a in accounts.values() if a.error]


def test_others_average_without_a_client_that_stays_away(base, beginning):
    split = split_settings(schedule="hierarchical", average_every=2, resume_timeout=0.5)
    clients = [Client(name, base, split) for name in SIZES]
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        disturbing = {"beta": stop_after(1, 1, "cut")}
        steps = dict.fromkeys(SIZES, 4)
        trained = train_together(clients, server, beginning, steps, {}, disturbing)
        accounts = {account.client: account for account in server.finish_lanes()}
    assert trained.keys() == {"alpha", "gamma"}
    assert "split.resume-timeout" in accounts["beta"].error
    assert_nothing_is_left()


def test_cutting_is_no_excuse_for_silence(base, beginning):
    split = split_settings(frame_timeout=2.0)
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        client = Client("alpha", base, split)
        with client.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            model.join(RoundPlan(3, 0, 3, 0), 16, time.monotonic() + 60)
            while not model.lane.wait_ended(0.3):
                cut(model.lane)
        (account,) = server.finish_lanes()
    assert "split.frame-timeout" in account.error and account.resumed > 1


class ForgetfulProxy(Proxy):
    """Forwards TCP; drops the first connection so that only the client notices."""

    def __init__(self, address, bytes_up):
        self._bytes_up = bytes_up
        self.clients = []
        super().__init__(address)

    def _pump(self, source, target, name):
        if name == "up":
            self.clients.append(source)
        with suppress(OSError):
            while content := source.recv(65536):
                setattr(self, name, getattr(self, name) + len(content))
                if source is self.clients[0] and self.up > self._bytes_up:
                    source.shutdown(socket.SHUT_RDWR)
                    return
                target.sendall(content)


@pytest.mark.slow
def test_the_server_need_not_know_that_a_lane_was_cut(base, beginning):
    split = split_settings(resume_timeout=10.0)
    results = []
    for disturbed in (False, True):
        with serving(base, beginning, split) as server:
            server.begin_round({"alpha": 9}, 0)
            proxy = ForgetfulProxy(server.address, 40_000 if disturbed else 10**9)

            def invite(*arguments, server=server, proxy=proxy):
                return replace(server.invite_to_train(*arguments), address=proxy.address)

            client = Client("alpha", base, split)
            own = client.train(SimpleNamespace(invite_to_train=invite), beginning, 7)
            (account,) = server.finish_lanes()
            results.append(own | server.end_round({"alpha": 9}))
        assert (account.steps, account.error, account.resumed) == (7, "", int(disturbed))
        assert len(proxy.clients) == 1 + disturbed
    assert_equal(*results)
    assert_nothing_is_left()
