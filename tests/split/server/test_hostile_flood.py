"""A flood of hostile peers changes no bit of honest clients' results, and leaks nothing."""

import ctypes
import gc
import multiprocessing
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from safetensors.torch import load, save

from finetuning.adapters.adapter import State
from split.protocol.errors import HandshakeError, LaneUnreachableError
from split.protocol.frames import Kind
from split.protocol.tickets import Invitation
from split.settings import SplitSettings
from tests.split.clients import SIZES, STEPS, Client, serving, split_settings, train_together
from tests.split.hostile import (
    CUTS,
    MEMBERS,
    OUTSIDERS,
    Member,
    hidden,
    join,
    outsider,
    recorded,
)

pytestmark = pytest.mark.nightly
_ROUNDS = 2
_OUTSIDERS_OF_A_KIND, _MEMBERS_OF_A_KIND = 10, 3  # in each round
_WIDTH = 32
# Without a leak the second flood leaves less than 1 MB more than the first.
_MAX_GROWTH = 12e6
_SPARE_THREADS = 4  # gRPC's own pool varies
_SETTLED_SECONDS = 60.0


def serve(link, base: Path, split: SplitSettings, state: bytes) -> None:
    """Serve in a separate process; a message contains a method's name and arguments."""
    torch.set_num_threads(1)
    with serving(base, load(state), split) as server, suppress(EOFError):
        while True:
            name, arguments = link.recv()
            if name == "trim":
                gc.collect()
                answer: Any = ctypes.CDLL(None).malloc_trim(0)
            else:
                answer = getattr(server, name)(*arguments)
            # Tensors would be sent as file descriptors.
            link.send(save(answer) if name == "end_round" else answer)


@dataclass(frozen=True)
class Resources:
    """The resources of the server's process; memory is in resident bytes."""

    memory: int
    threads: int
    descriptors: int


class RemoteServer:
    """A block server in a separate process, with the block server's methods."""

    def __init__(self, base: Path, split: SplitSettings, state: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, other = context.Pipe()
        arguments = (other, base, split, state)
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        other.close()
        self._lock = threading.Lock()

    def __getattr__(self, name: str):
        return partial(self._ask, name)

    def _ask(self, name: str, *arguments):
        with self._lock:
            self._link.send((name, arguments))
            assert self._link.poll(120), f"{name} was not answered"
            return self._link.recv()

    def resources(self, idle: Resources | None) -> Resources:
        """Measure the process once ended connections and lanes are closed, or after a minute."""
        process, end = psutil.Process(self._process.pid), time.monotonic() + _SETTLED_SECONDS
        while idle is not None and time.monotonic() < end:
            if process.num_fds() <= idle.descriptors and process.num_threads() <= idle.threads:
                break
            time.sleep(0.5)
        self._ask("trim")
        return Resources(process.memory_info().rss, process.num_threads(), process.num_fds())

    def close(self) -> None:
        self._link.close()
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def patiently(act):
    """Try again for half a minute while the flood occupies all connections to the server."""
    for _ in range(60):
        with suppress(HandshakeError, LaneUnreachableError, grpc.RpcError):
            return act()
        time.sleep(0.5)
    raise AssertionError("the server had no room for half a minute")


class Patient(Client):
    """An honest client that retries until the server accepts its connection."""

    def train(self, *arguments, **named) -> State:
        return patiently(lambda: super(Patient, self).train(*arguments, **named))


class Flood:
    """Context manager that runs hostile peers of all kinds, and a peer that joins the round.

    Args:
        server: The server to attack.
        number: Number of the round.
        alone: Whether clients train one at a time.

    Attributes:
        alive: Kinds of members that the server did not end.

    """

    def __init__(self, server: RemoteServer, number: int, alone: bool) -> None:
        self._alone = alone
        spoiling = server.invite_to_train("mallory", 1, 0, 60.0)  # the server has one round
        self._honest = server.invite_to_train("alpha", number, 0, 60.0)
        self._members = [
            (kind, server.invite_to_evaluate(f"{kind} {i}", number, {"base": None}, 600.0))
            for i in range(_MEMBERS_OF_A_KIND)
            for kind in MEMBERS
        ]
        self.alive: set[str] = set()
        self._begun, self._over = threading.Event(), threading.Event()
        self._errors: list[BaseException] = []
        works = (self._come_as_outsiders, self._come_as_members, partial(spoil, spoiling))
        self._threads = [threading.Thread(target=self._run, args=(work,)) for work in works]
        self._spoiling = self._threads[-1]

    def __enter__(self) -> "Flood":
        for thread in self._threads:
            thread.start()
        assert self._begun.wait(30)
        if self._alone:
            self._spoiling.join()  # it would be refused during another client's turn
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        assert not self._errors, self._errors

    def _run(self, work) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def _come_as_outsiders(self) -> None:
        hello, address = recorded(self._honest), self._honest.address
        with ExitStack() as stack:
            for _ in range(_OUTSIDERS_OF_A_KIND):
                for write in OUTSIDERS.values():
                    stack.enter_context(outsider(address, write(self._honest, hello)))
            self._begun.set()
            self._over.wait()

    def _come_as_members(self) -> None:
        for kind, invitation in self._members:
            try:
                member = Member(invitation)
            except grpc.RpcError:  # outsiders occupy all connections at the moment
                continue
            with closing(member):
                for record in MEMBERS[kind](member.sealer, _WIDTH):
                    member.send(record)
                if not member.is_ended():
                    self.alive.add(kind)


def spoil(invitation: Invitation) -> None:
    """Join a training round, and send numbers that would make other clients' gradients NaN."""
    with closing(patiently(lambda: Member(invitation))) as member:
        fields = {"steps": STEPS, "first_step": 0, "total_steps": STEPS, "longest": 4}
        member.send(join(member.sealer, fields | {"wants_gradient": True}))
        assert member.wait_for(Kind.WELCOME, Kind.ERROR) is Kind.WELCOME
        counts = {"targets": 1, "step_targets": 1, "micro_batches": 1}
        member.send(hidden(member.sealer, _WIDTH, number=3e38, **counts))
        assert member.is_ended()


def train_all(clients, server: RemoteServer, state: State, together: bool) -> dict[str, State]:
    if together:
        return train_together(clients, server, state, dict.fromkeys(SIZES, STEPS))
    return {client.name: client.train(server, state, STEPS) for client in clients}


def run(base: Path, state: State, split: SplitSettings, idle: Resources | None):
    """Train the rounds, undisturbed if ``idle`` is None; return weights and resources by round."""
    clients = [Patient(name, base, split) for name in SIZES]
    together = split.schedule == "client-batch"
    weights, resources = [], []
    with closing(RemoteServer(base, split, save(state))) as server:
        for number in range(1, _ROUNDS + 1):
            if idle is None:
                server.begin_round(SIZES, 0)
                trained = train_all(clients, server, state, together)
            else:
                server.begin_round(SIZES | {"mallory": 5}, 0)
                with Flood(server, number, alone=not together) as flood:
                    trained = train_all(clients, server, state, together)
                assert not flood.alive
            errors = {a.client: a.error for a in server.finish_lanes() if a.error}
            assert not errors.keys() & SIZES.keys(), errors
            if idle is not None:
                refused = {name.rpartition(" ")[0] for name in errors}
                assert refused >= MEMBERS.keys() - CUTS, errors
            weights.append(trained | {"body": load(server.end_round(SIZES))})
            resources.append(server.resources(idle))
    return weights, resources


@pytest.mark.parametrize("schedule", ["serial", "client-batch"])
def test_a_flood_costs_no_bit_and_leaves_nothing(base, beginning, schedule, monkeypatch):
    # What the server holds is measured, not what glibc keeps in a heap for each of many threads.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**20))
    split = split_settings(schedule=schedule)
    quiet, (_, idle) = run(base, beginning, split, None)
    disturbed, (first, second) = run(base, beginning, split, idle)
    for expected, found in zip(quiet, disturbed, strict=True):
        assert expected.keys() == found.keys()
        for party, state in expected.items():
            assert all(torch.equal(value, found[party][n]) for n, value in state.items()), party
    assert second.descriptors <= max(first.descriptors, idle.descriptors)
    assert second.threads <= idle.threads + _SPARE_THREADS
    assert second.memory - first.memory <= _MAX_GROWTH, (idle, first, second)
