"""Malicious clients with a lane don't affect other clients."""

import re
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Thread

import pytest
import torch

from split.protocol.errors import PeerError
from split.protocol.frames import Kind
from split.protocol.training import RoundPlan
from split.server.schedules.share_cap import ShareCap
from tests.marks import nightly
from tests.split.clients import SIZES, TRAIN, Client, serving, split_settings, train_together
from tests.split.lanes import SOON, Proxy, ended


class Dribble(Proxy):
    """Forwards one byte at a time to the server once ``slow`` is set."""

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


def test_a_frame_sent_byte_by_byte_ends_with_the_frame_timeout(base, beginning):
    split = split_settings(frame_timeout=1.0)
    client = Client("alpha", base, split)
    with serving(base, beginning, split) as server:
        server.begin_round({"alpha": 9}, 0)
        proxy = Dribble(server.address)
        invitation = server.invite_to_train("alpha", 1, 0, 60.0)
        with client.lane(replace(invitation, address=proxy.address)) as model:
            model.join(RoundPlan(3, 0, 3, 0), 16, time.monotonic() + SOON)
            proxy.slow = True
            model.lane.send(Kind.HIDDEN, 0, 0, {"hidden": torch.zeros(2, 8, 32)})
            ended(model.lane, PeerError, r"split\.frame-timeout")
            proxy.cut()
        assert "split.frame-timeout" in server.finish_lanes()[0].error


def spoil(change):
    """Return a function that applies ``change`` to the tensors in a client's frames."""

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


def as_float64(kind, tensors, fields):
    if kind is Kind.AVERAGE:
        tensors = {n: torch.full_like(t, 1e300, dtype=torch.float64) for n, t in tensors.items()}
    return tensors, fields


def with_norm(squared_norm):
    def change(kind, tensors, fields):
        return tensors, fields | ({"squared_norm": squared_norm} if kind is Kind.STEP else {})

    return spoil(change)


SPOILT = {
    "huge hidden states": (huge(Kind.HIDDEN, 3e38), "beyond 2³⁰"),
    "huge gradients": (huge(Kind.GRADIENT, -3e38), "beyond 2³⁰"),
    "a huge norm": (with_norm(1e308), "squared_norm"),
}


def train_beside(base, beginning, disturb, names=tuple(SIZES), lifetime=60.0, **changes):
    """Train together with beta, whose frames are disturbed; return the weights and the accounts."""
    split = split_settings(**({"schedule": "client-batch"} | changes))
    clients = [Client(name, base, split) for name in names]
    for client in clients:
        client.lifetime = lifetime
    with serving(base, beginning, split) as server:
        server.begin_round({name: SIZES[name] for name in names}, 0)
        steps = dict.fromkeys(names, 3)
        trained = train_together(clients, server, beginning, steps, disturbing={"beta": disturb})
        accounts = {account.client: account for account in server.finish_lanes()}
        trained["body"] = server.end_round(SIZES)
        assert all(v.isfinite().all() for v in trained["body"].values())
    return trained, accounts


@pytest.mark.parametrize("names", [nightly(("alpha", "beta")), ("alpha", "beta", "gamma")], ids=len)
@pytest.mark.parametrize("how", ["norm", "gradients"])
def test_exaggerated_norms_and_gradients_do_not_stop_others(base, beginning, names, how):
    """A client that reported a norm of 3e14 used to scale the others' gradients to almost zero."""
    lie = with_norm(1e29) if how == "norm" else huge(Kind.GRADIENT, 2.0**30)
    moved = []
    for disturb in (lambda model: None, lie):
        trained, _ = train_beside(base, beginning, disturb, names)
        moved.append(
            {
                who: max(float((v - beginning[n]).abs().max()) for n, v in trained[who].items())
                for who in ("alpha", "body")
            }
        )
    assert moved[1]["alpha"] > 0.5 * moved[0]["alpha"]
    assert moved[1]["body"] > 0.5 * moved[0]["body"]


def test_a_share_is_capped_by_what_is_usual_of_the_others():
    cap = ShareCap(10.0)
    ones = dict.fromkeys("abc", 1)
    assert cap.factors({"a": 1.0, "b": 4.0, "c": 99.0**2}, ones) == {
        "a": 1.0,
        "b": 1.0,
        "c": 20 / 99,
    }
    # One that sends almost nothing doesn't lower the others' cap.
    assert ShareCap(10.0).factors({"a": 49.0, "b": 1.0, "c": 1e-20}, ones)["a"] == 1.0
    # The median doesn't follow a single measure, and a client alone has nobody to outweigh.
    assert cap.factors({"a": 1.0, "b": 1e-30, "c": 1.0}, ones) == dict.fromkeys("abc", 1.0)
    # One that sends almost nothing lowers it to another honest one's at most.
    four = {"a": 49.0, "b": 49.0, "c": 1.0, "d": 1e-20}
    assert ShareCap(10.0).factors(four, dict.fromkeys("abcd", 1))["a"] == 1.0
    cap.remove("b"), cap.remove("c")
    assert cap.factors({"a": 1e9}, {"a": 1}) == {"a": 1.0}


@pytest.mark.parametrize("leaves", [False, True])
def test_who_comes_first_is_capped_when_another_has_come(leaves):
    """Even if it has left by then."""
    cap = ShareCap(10.0)
    assert cap.factors({"a": 1e18}, {"a": 1}) == {"a": 1.0}
    assert cap.late_factor() == 1.0
    if leaves:
        cap.remove("a")
    assert cap.factors({"b": 1.0}, {"b": 1}) == {"b": 1.0}
    assert cap.late_factor() == pytest.approx(1e-8)
    assert cap.late_factor() == 1.0
    # 10 was left of a, or nothing if it has left.
    assert cap.factors({"b": 1e18}, {"b": 1}) == {"b": 1.0 if leaves else pytest.approx(1e-7)}


@pytest.mark.parametrize("what", SPOILT)
def test_numbers_that_could_spoil_the_stack_end_their_lane_alone(base, beginning, what):
    """Without limits the stack's gradients would be NaN, and all its lanes would end."""
    disturb, reason = SPOILT[what]
    trained, accounts = train_beside(base, beginning, disturb)
    assert set(trained) == {"alpha", "gamma", "body"}
    assert reason in accounts["beta"].error
    assert not accounts["alpha"].error and not accounts["gamma"].error


def test_the_largest_allowed_numbers_leave_the_stack_finite(base, beginning):
    def disturb(model):
        huge(Kind.HIDDEN, 2.0**30)(model)
        huge(Kind.GRADIENT, 2.0**30)(model)

    trained, accounts = train_beside(base, beginning, disturb)
    assert {"alpha", "gamma"} <= set(trained)
    assert not accounts["alpha"].error and not accounts["gamma"].error


@pytest.mark.parametrize(
    ("disturb", "reason"),
    [(spoil(as_float64), "torch.float64"), (huge(Kind.AVERAGE, 3e38), "beyond 2³⁰")],
    ids=["float64", "huge"],
)
def test_adapters_that_would_spoil_the_average_end_one_lane(base, beginning, disturb, reason):
    changes = {"schedule": "hierarchical", "average_every": 2}
    trained, accounts = train_beside(base, beginning, disturb, **changes)
    assert set(trained) == {"alpha", "gamma", "body"}
    assert all(v.isfinite().all() for state in trained.values() for v in state.values())
    assert reason in accounts["beta"].error
    assert not accounts["alpha"].error and not accounts["gamma"].error


def test_others_do_not_learn_why_a_common_computation_failed(base, beginning):
    split = split_settings(schedule="client-batch")
    clients = [Client(name, base, split) for name in ("alpha", "beta")]
    with serving(base, beginning, split) as server:

        def fail(model):
            server.compute.call(lambda: server.body.remove(server.schedule.adapters.name))

        server.begin_round({"alpha": 9, "beta": 6}, 0)
        steps = {"alpha": 3, "beta": 3}
        disturbing = {"alpha": fail, "beta": lambda model: None}
        assert not train_together(clients, server, beginning, steps, disturbing=disturbing)
        reasons = {account.error for account in server.finish_lanes()}
    assert reasons == {"the server failed to compute the clients' micro-batches"}


def test_a_busy_client_does_not_stop_the_clock_of_a_silent_one(base, beginning):
    split = split_settings(schedule="client-batch", gather_timeout=1.0, window=10)
    train = TRAIN.model_copy(update={"accumulation": 10})
    times = {}
    # Here: transformers can't load two models at once in a process.
    clients = {name: Client(name, base, split) for name in ("beta", "gamma")}

    def join(server, name):
        invitation = server.invite_to_train(name, 1, 0, 60.0)
        model = lanes.enter_context(clients[name].lane(invitation))
        model.join(RoundPlan(3, 0, 3, 0), 16, time.monotonic() + SOON)
        return model.lane

    def hang(server):
        ended(join(server, "beta"), PeerError, r"split\.gather-timeout")
        times["hung"] = time.monotonic()

    def keep_sending(server):
        lane = join(server, "gamma")
        counts = {"targets": 3, "step_targets": 30, "micro_batches": 10, "side": "right"}
        for index in range(8):
            tensors = {"hidden": torch.zeros(1, 8, 32), "lengths": torch.tensor([8])}
            lane.send(Kind.HIDDEN, 0, index, tensors, counts)
            time.sleep(0.5)
        times["sent"] = time.monotonic()

    with ExitStack() as lanes, serving(base, beginning, split, train=train) as server:
        server.begin_round({"beta": 6, "gamma": 3}, 0)
        threads = [Thread(target=target, args=(server,)) for target in (hang, keep_sending)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert times["hung"] < times["sent"]


@pytest.mark.parametrize(
    "changes",
    [{"schedule": "client-batch"}, nightly({"schedule": "hierarchical", "average_every": 2})],
    ids=lambda changes: changes["schedule"],
)
def test_a_slow_client_takes_at_most_half_of_the_round(base, beginning, changes):
    def be_slow(model):
        send = model.lane.send

        def sending(*arguments, **named):
            time.sleep(0.4)
            send(*arguments, **named)

        model.lane.send = sending

    trained, accounts = train_beside(
        base, beginning, be_slow, lifetime=5.0, gather_timeout=2.0, **changes
    )
    assert set(trained) == {"alpha", "gamma", "body"}
    assert re.match(r"other clients waited \d+ s for beta, .*round-timeout", accounts["beta"].error)
    assert accounts["beta"].steps < 2
    assert not accounts["alpha"].error and not accounts["gamma"].error
