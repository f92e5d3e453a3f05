"""Violations by a client end its lane with a reason, and don't affect other clients' training."""

import threading
import time
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from split.model.adapters import take_apart
from split.model.part import Part
from split.model.partition import partition_of
from split.protocol.errors import LaneError
from split.protocol.frames import Kind
from split.protocol.training import RoundPlan
from split.server.compute import Priority, first_ready
from tests.split.clients import (
    SIZES,
    TRAIN,
    Client,
    bodies_kept,
    send_texts,
    serving,
    split_settings,
)
from tests.waiting import wait_until


class Refusals:
    """A client that violates the protocol; its lane must end with a reason."""

    def __init__(self, base, split) -> None:
        self.client = Client("alpha", base, split)
        self.hidden = torch.zeros(2, 8, 32)
        self.lengths = torch.tensor([8, 8])
        self.counts = {"targets": 3, "step_targets": 3, "micro_batches": 1, "side": "right"}

    def join(self, model, steps=3, first_step=0, total_steps=3) -> None:
        deadline = time.monotonic() + 60
        model.join(RoundPlan(steps, first_step, total_steps, 0), 16, deadline)

    def send_hidden(self, model, index=0, step=0, **changes) -> None:
        tensors = {"hidden": self.hidden, "lengths": self.lengths}
        model.lane.send(Kind.HIDDEN, step, index, tensors, self.counts | changes)

    def gradient(self, model, shape=(2, 8, 32)) -> None:
        model.lane.send(Kind.GRADIENT, 0, 0, {"gradient": torch.zeros(shape)})


def odd_gradient(self, model):
    self.join(model)
    self.send_hidden(model)
    model.lane.receive(30)
    self.gradient(model, (1, 8, 32))


def early_end(self, model):
    self.join(model)
    self.send_hidden(model)
    model.lane.send(Kind.END)


# protocol/test_training.py has all reasons.
REFUSED = {
    "without joining": (lambda self, model: self.send_hidden(model), "began with"),
    "a gradient of another shape": (odd_gradient, "shape"),
    "an end within a step": (early_end, "the round ended after 0 of 3 steps"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_client_may_not_do_ends_its_lane_alone(base, beginning, what):
    split = split_settings()
    disturb, reason = REFUSED[what]
    train = TRAIN.model_copy(update={"accumulation": 9})
    with serving(base, beginning, split, train=train) as server:
        server.begin_round({"alpha": 9}, 0)
        refused = Refusals(base, split)
        invitation = server.invite_to_train("alpha", 1, 0, 60.0)
        with refused.client.lane(invitation) as model, pytest.raises(LaneError):
            disturb(refused, model)
            while True:
                model.lane.receive(30.0)
        (account,) = server.finish_lanes()
        assert reason in account.error
        assert all(torch.equal(v, beginning[n]) for n, v in server.end_round({}).items())
        # The server is there for the next one.
        server.begin_round({"alpha": 9}, 0)
        refused.client.train(server, beginning, 2)
        assert not server.finish_lanes()[0].error


def test_a_row_longer_than_the_run_allows_is_refused(base, beginning):
    split = split_settings()
    with serving(base, beginning, split, columns=7) as server:
        server.begin_round({"alpha": 9}, 0)
        refused = Refusals(base, split)
        with refused.client.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            refused.join(model)
            refused.send_hidden(model)
            reason = r"rows of 8 tokens; at most 7 were agreed on \(data\.max-length"
            with pytest.raises(LaneError, match=reason):
                model.lane.receive(30.0)


@pytest.mark.parametrize(
    ("schedule", "credits"), [("serial", 6), ("client-batch", 2), ("hierarchical", 2)]
)
def test_clients_share_the_budget_unless_they_take_turns(base, beginning, schedule, credits):
    """Three clients, and room for six micro-batches."""
    split = split_settings(schedule=schedule, activation_budget=6 * 16, window=8)
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        for other in ("beta", "gamma"):
            server.mark_absent(other)
        invitation = server.invite_to_train("alpha", 1, 0, 60.0)
        with Client("alpha", base, split).lane(invitation) as model:
            fields = {"steps": 3, "first_step": 0, "total_steps": 3, "longest": 16}
            model.lane.send(Kind.JOIN, fields=fields)
            assert model.lane.receive(30.0).fields == {"credits": credits}


def test_a_turn_excludes_other_clients(base, beginning):
    """However often another client tries; it trains as soon as the turn has ended."""
    split = split_settings()
    alpha, beta = (Refusals(base, split), Client("beta", base, split))
    with serving(base, beginning, split) as server:
        server.begin_round(SIZES, 0)
        with alpha.client.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            alpha.join(model)
            for _ in range(2):
                with pytest.raises(LaneError, match="beta can't begin before alpha's turn"):
                    beta.train(server, beginning, 3)
            alpha.send_hidden(model)
            assert model.lane.receive(30.0).kind is Kind.HIDDEN
        server.finish_lanes()
        beta.train(server, beginning, 3)


# protocol/test_evaluation.py has all reasons.
REFUSED_TEXTS = {
    "two in flight": (lambda m: [send_texts(m) for _ in range(9)], "in flight"),
    "nothing": (lambda m: send_texts(m, new_tokens=0), "received 0 new tokens"),
    "what was not agreed": (lambda m: send_texts(m, 1, 1, 1), "evaluate.generate"),
}


def hold(started, release):
    """Keep the compute thread busy until it is released."""
    started.set()
    release.wait(60)


@contextmanager
def busy(server):
    """Keep the compute thread from running new jobs within the block."""
    started, release = threading.Event(), threading.Event()
    thread = threading.Thread(target=server.compute.call, args=[partial(hold, started, release)])
    thread.start()
    try:
        assert started.wait(20)
        yield
    finally:
        release.set()
        thread.join(20)


def cleans_up(server):
    """Return whether a job waits that frees the memory of a client."""
    return any(job.priority is Priority.CLEANUP for job in server.compute.waiting)


@pytest.mark.parametrize("schedule", ["serial", "client-batch"])
def test_a_round_does_not_end_before_its_last_step_is_computed(base, beginning, schedule):
    split = split_settings(schedule=schedule)
    client = Refusals(base, split)
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        with client.client.lane(server.invite_to_train("alpha", 1, 0, 60.0)) as model:
            client.join(model, steps=1, total_steps=1)
            client.send_hidden(model)
            model.lane.receive(30.0)
            client.gradient(model)
            model.lane.receive(30.0)
            with ExitStack() as later:
                with busy(server):
                    model.lane.send(Kind.STEP, 0, fields={"squared_norm": 1.0})
                    model.lane.send(Kind.END)
                    wait_until(lambda: cleans_up(server))
                    # The step waits for another job when the session looks.
                    started, held = threading.Event(), threading.Event()
                    job = partial(hold, started, held)
                    thread = threading.Thread(target=server.compute.call, args=[job])
                    later.callback(thread.join, 20)
                    later.callback(held.set)
                    thread.start()
                    wait_until(lambda: len(server.compute.waiting) == 3)
                assert started.wait(20)
                wait_until(lambda: cleans_up(server))
            with pytest.raises(LaneError):
                while True:
                    model.lane.receive(30.0)
        (account,) = server.finish_lanes()
        assert "before its last step was computed" in account.error


def test_prompts_for_a_model_that_fails_to_attach_cost_no_budget(base, beginning, monkeypatch):
    client = Client("alpha", base, split_settings())
    attach = Part.attach

    def attached(part, settings, name="default"):
        if name.startswith("evaluation"):
            raise torch.OutOfMemoryError("allocated too much")
        attach(part, settings, name)

    with serving(base, beginning, split_settings()) as server:
        before = server.compute.free_tokens
        models = {"global": take_apart(beginning, partition_of(base, split_settings()))["body"]}
        with client.lane(server.invite_to_evaluate("alpha", 0, models, 60.0)) as model:
            monkeypatch.setattr(Part, "attach", attached)
            with busy(server):
                model.lane.send(Kind.JOIN, fields={"model": "global"})
                send_texts(model)
                wait_until(lambda: len(server.compute.waiting) == 2)
            with pytest.raises(LaneError):
                while True:
                    model.lane.receive(30.0)
        server.finish_lanes()
        assert server.compute.free_tokens == before


@pytest.mark.parametrize("what", REFUSED_TEXTS)
def test_what_a_generation_may_not_do_ends_its_lane_alone(base, beginning, what):
    disturb, reason = REFUSED_TEXTS[what]
    client = Client("alpha", base, split_settings())
    agreed = {"max_cached_tokens": 0} if what == "what was not agreed" else {}

    def lane():
        return client.lane(server.invite_to_evaluate("alpha", 0, {"base": None}, 60.0))

    with serving(base, beginning, split_settings(), **agreed) as server:
        with lane() as model:
            model.choose("base", None)
            with pytest.raises(LaneError):
                if reason == "in flight":  # and not computed before more comes
                    with busy(server):
                        disturb(model)
                        wait_until(lambda: cleans_up(server))
                else:
                    disturb(model)
                while True:
                    model.lane.receive(30.0)
        (account,) = server.finish_lanes()
        assert reason in account.error
        assert not bodies_kept()
        with lane() as model:
            model.choose("base", None)
            tokens = torch.tensor([[5, 6, 7]])
            if not agreed:
                model.generate(tokens, torch.ones_like(tokens), 4, do_sample=False)
            model.end()
        assert not server.finish_lanes()[0].error


def test_choosing_the_same_model_again_needs_no_job(base, beginning):
    client = Client("alpha", base, split_settings())
    with serving(base, beginning, split_settings()) as server, ExitStack() as lanes:
        invitation = server.invite_to_evaluate("alpha", 0, {"base": None}, 60.0)
        model = lanes.enter_context(client.lane(invitation))
        model.choose("base", None)
        with busy(server):
            model.lane.send(Kind.JOIN, fields={"model": "base"})
            assert model.lane.receive(20.0).kind is Kind.WELCOME


def test_choosing_a_model_does_not_overtake_prompts(base, beginning):
    """Clients that did nothing else used to keep a third's prompt waiting for ever."""
    clients = [Client(name, base, split_settings()) for name in ("alpha", "beta")]
    with serving(base, beginning, split_settings()) as server, ExitStack() as lanes:
        alpha, beta = (
            lanes.enter_context(
                client.lane(server.invite_to_evaluate(client.name, 0, {"base": None}, 60.0))
            )
            for client in clients
        )
        beta.choose("base", None)
        with busy(server):
            send_texts(beta)
            wait_until(lambda: len(server.compute.waiting) == 1)
            alpha.lane.send(Kind.JOIN, fields={"model": "base"})
            wait_until(lambda: len(server.compute.waiting) == 2)
            first = first_ready(server.compute.waiting, free_tokens=100, now=0.0)
            assert first.owner.account.client == "beta"
