"""Clients whose process is killed during a step, with each schedule."""

import multiprocessing
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from finetuning.adapters.adapter import State
from split.protocol.frames import Kind
from split.server.block_server import BlockServer
from split.settings import SplitSettings
from tests.marks import nightly
from tests.split.clients import (
    SIZES,
    Client,
    assert_close,
    assert_nothing_is_left,
    serving,
    split_settings,
    train_together,
)
from tests.split.server.test_client_batch import SERVER, SETTINGS, Reference
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
_STEPS, _LAST_STEP = 5, 2
# The moment in its last step at which a client is killed: what it has just sent or received, of its
# second micro-batch, and how many micro-batches of it count in a stack.
STAGES = {
    "in forward": ("send", Kind.HIDDEN, 1),
    "between": ("receive", Kind.HIDDEN, 1),
    "in backward": ("send", Kind.GRADIENT, 2),
}


def train_until(stage: str, base: Path, split: SplitSettings, state: State, link) -> None:
    """Train as beta up to a stage, report it, and never continue."""
    torch.set_num_threads(1)
    client = Client("beta", base, split)
    how, kind, _ = STAGES[stage]

    def disturb(model) -> None:
        act = getattr(model.lane, how)
        seen = []

        def acting(*arguments, **named):
            result = act(*arguments, **named)
            if how == "send":
                done = (arguments[0], named.get("step"))
            else:
                done = (result.kind, result.step)
            if done == (kind, _LAST_STEP):
                seen.append(done)
                if len(seen) == 2:
                    # With its answer, at the latest, the server acknowledges what it was sent.
                    wait_until(lambda: not model.lane._delivery.kept_bytes)
                    link.send("here")
                    time.sleep(600)
            return result

        setattr(model.lane, how, acting)

    link.send("ready")
    invitation = link.recv()
    server = SimpleNamespace(invite_to_train=lambda *_: invitation)
    client.train(server, state, _STEPS, SETTINGS["beta"], disturb)


class Beta:
    """A client in a separate process."""

    def __init__(self, *arguments) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        self._process = context.Process(target=train_until, args=(*arguments, other), daemon=True)
        self._process.start()
        other.close()
        # The other clients' time limit must not pass while this process imports torch.
        assert self._link.recv() == "ready"

    def train(self, server: BlockServer) -> None:
        """Start to train, and kill the client's process when it has reached its stage."""
        self._link.send(server.invite_to_train("beta", 1, 0, 60.0))
        assert self._link.poll(120) and self._link.recv() == "here"
        self._process.kill()
        self._process.join(20)

    @property
    def was_killed(self) -> bool:
        """Whether the client was killed at its stage."""
        return self._process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    "stage",
    [
        "in backward",
        *(nightly(stage) for stage in ("in forward", "between")),
    ],
)
def test_a_stack_goes_on_with_what_a_killed_client_had_finished(base, beginning, stage):
    split = split_settings(schedule="client-batch", window=1, resume_timeout=0.5)
    beta = Beta(stage, base, split, beginning)
    clients = [Client(name, base, split) for name in ("alpha", "gamma")]
    steps = dict.fromkeys(SIZES, _STEPS)
    with serving(base, beginning, split, train=SERVER) as server:
        server.begin_round(SIZES, 0)
        killing = threading.Thread(target=beta.train, args=(server,))
        killing.start()
        trained = train_together(clients, server, beginning, steps, SETTINGS)
        killing.join(150)
        assert beta.was_killed
        accounts = {account.client: account for account in server.finish_lanes()}
        body = server.end_round({name: SIZES[name] for name in trained})
    reference = Reference(base, beginning, split)
    for index in range(_STEPS):
        going = {name: None for name in SIZES if name != "beta" or index < _LAST_STEP}
        counts = {"beta": STAGES[stage][2]} if index == _LAST_STEP else {}
        reference.step(index, going | counts)
    assert set(trained) == {"alpha", "gamma"}
    for name, state in trained.items():
        assert_close(state, reference.own[name])
    assert_close(body, {n: p.detach() for n, p in reference.body.items()})
    assert (accounts["beta"].steps, bool(accounts["beta"].error)) == (_LAST_STEP, True)
    assert_nothing_is_left()


@pytest.mark.parametrize(
    ("schedule", "stage"),
    [
        ("hierarchical", "in forward"),
        nightly("serial", "in backward"),
    ],
)
def test_others_train_as_if_a_killed_client_had_not_been_there(base, beginning, schedule, stage):
    split = split_settings(schedule=schedule, resume_timeout=0.5)
    results = []
    for killed in ([Beta(stage, base, split, beginning)], []):
        clients = [Client(name, base, split) for name in ("alpha", "gamma")]
        with serving(base, beginning, split, train=SERVER) as server:
            names = ["alpha", "gamma", *["beta"] * len(killed)]
            server.begin_round({name: SIZES[name] for name in names}, 0)
            for beta in killed:
                beta.train(server)
                wait_until(lambda: not server.progress())  # its turn is over
            own = {client.name: client.train(server, beginning, _STEPS) for client in clients}
            accounts = {account.client: account for account in server.finish_lanes()}
            body = server.end_round({client.name: SIZES[client.name] for client in clients})
        results.append(body | {f"{c}/{n}": v for c, state in own.items() for n, v in state.items()})
        assert [c for c, account in accounts.items() if account.error] == ["beta"] * len(killed)
    one, other = results
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert_nothing_is_left()
