"""A flood of hostile peers beside three honest clients: what they lose by it.

    python -m bench.hostile [--count 10000]

For ``serial`` and for ``client-batch`` three honest clients train two rounds, once undisturbed and
once beside a flood in each round, spread over the time that the round takes undisturbed; each is a
quarter of ``--count``. Every tenth peer is a member with a ticket for an evaluation, who finishes
the handshake and then sends something odd; the others are strangers on the port. In each disturbed
round one more hostile client is invited to train: it joins, and sends numbers that would spoil a
stack.

The run fails if the honest clients' or the body's weights differ in a single bit, or if the second
flood leaves the server with more than the first one has: more file descriptors, more than two more
threads (gRPC's own pool is not always of one size), or more than 4 MB more memory (resident, after
collecting garbage and giving free memory back to the system). That the first one leaves something,
buffers that stay and holes in the heap, can be seen beside what rounds without any have left.

What glibc keeps in the heaps of many threads is not counted: as in ``bench.memory --mapped`` they
share two heaps, and map large blocks.

The server and the honest clients have one core, the hostile peers another one if there is one.
"""

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Literal

import grpc
import psutil
import torch
from rich.console import Console
from rich.table import Table

from bench.hostile_members import Member, hidden, join
from bench.hostile_peers import Attack, flood
from bench.hostile_rounds import HONEST, serve_rounds, train_honest
from bench.split_job import Job, Shape, random_examples
from bench.split_processes import Worker
from bench.split_step import ADAPTER
from finetuning.adapters.adapter import State
from finetuning.settings import SplitSettings, TrainSettings
from split.protocol.frames import Value
from split.protocol.handshake import ClientHandshake
from split.protocol.invitation import Invitation
from split.protocol.keys import known_suite

Schedule = Literal["serial", "client-batch"]
_SHAPE = Shape(hidden=64, blocks=4, vocabulary=256, columns=32, micro_batches=2)
_ROUNDS, _MEMBERS_SHARE = 2, 10
_MOST_GROWTH = 4e6
_SPARE_THREADS = 2
_SETTLED_SECONDS = 8.0


@dataclass(frozen=True)
class Resources:
    """What the server's process has.

    Attributes:
        memory: resident, in bytes.
        threads: how many.
        descriptors: open files and sockets.

    """

    memory: int
    threads: int
    descriptors: int


@dataclass
class Outcome:
    """Two rounds of training, undisturbed or not.

    Attributes:
        weights: after each round, by party or client.
        seconds: that the honest clients took for each round.
        resources: of the server after each round.
        made: hostile peers by kind.
        ended: how many of them the server ended by itself.
        flood_seconds: that the floods took.

    """

    weights: list[dict[str, State]]
    seconds: list[float]
    resources: list[Resources]
    made: Counter[str]
    ended: Counter[str]
    flood_seconds: float = 0.0


def spoil(invitation: Invitation) -> None:
    """Join a round of training, and send numbers that would make others' gradients NaN."""
    with suppress(grpc.RpcError), closing(Member(invitation)) as member:
        fields: dict[str, Value] = {"steps": 9, "first_step": 0, "total_steps": 9, "longest": 4}
        member.send(join(member.sealer, fields | {"wants_gradient": True}))
        member.wait()
        member.send(hidden(member.sealer, _SHAPE.hidden, number=3e38, counts=True))
        member.until_ended()


class Bench:
    """The three processes, and what they do in turn.

    Args:
        server: see ``serve_rounds``.
        honest: see ``train_honest``.
        hostile: see ``flood``.

    """

    def __init__(self, server: Worker, honest: Worker, hostile: Worker) -> None:
        self._server, self._honest, self._hostile = server, honest, hostile
        self._process = psutil.Process(server.pid)

    def run(self, split: SplitSettings, peers: int, seconds: float) -> Outcome:
        """Train two rounds, each beside so many peers in so much time; none if it is 0."""
        outcome = Outcome([], [], [], Counter(), Counter())
        self._server.send(split)
        for _ in range(_ROUNDS):
            train, evaluate = self._server.ask(peers // _MEMBERS_SHARE)
            if peers:
                self._attack(train, evaluate, peers, seconds)
                spoiling = Thread(target=spoil, args=train[len(HONEST) :])
                spoiling.start()
                if split.schedule == "serial":  # it would be refused in another one's turn
                    spoiling.join()
            together = split.schedule == "client-batch"
            took, weights = self._honest.ask((not outcome.seconds, together, train[:3]))
            outcome.seconds.append(took)
            if peers:
                spoiling.join()
                made, ended, flood_seconds = self._hostile.receive()
                outcome.made += made
                outcome.ended += ended
                outcome.flood_seconds += flood_seconds
            body, errors = self._server.ask("end")
            if errors:
                raise SystemExit(f"lanes of honest clients ended: {errors}")
            outcome.weights.append(dict(zip(HONEST, weights, strict=True)) | {"body": body})
            outcome.resources.append(self._resources())
            self._server.send("next")
        return outcome

    def _attack(
        self,
        train: Sequence[Invitation],
        evaluate: Sequence[Invitation],
        peers: int,
        seconds: float,
    ) -> None:
        # As it is seen on the network when a client is cut off after its first message.
        seen = train[0]
        suite = known_suite(seen.suite)
        hello = ClientHandshake(seen.ticket, seen.identity, seen.server_key, suite).hello()
        strangers = peers - len(evaluate)
        self._hostile.send(Attack(seen.address, hello, evaluate, strangers, seconds))

    def _resources(self) -> Resources:
        """Measure the server, when connections without streams and lanes that ended are gone."""
        time.sleep(_SETTLED_SECONDS)
        self._server.ask("trim")
        process = self._process
        return Resources(process.memory_info().rss, process.num_threads(), process.num_fds())


def same(one: Sequence[Mapping[str, State]], other: Sequence[Mapping[str, State]]) -> bool:
    """Say whether all weights are equal, bit for bit."""
    return all(
        mine.keys() == theirs.keys()
        and all(torch.equal(v, theirs[p][n]) for p, s in mine.items() for n, v in s.items())
        for mine, theirs in zip(one, other, strict=True)
    )


def print_kinds(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print how many hostile peers of each kind there were."""
    made = sum((outcome.made for outcome in outcomes), Counter[str]())
    ended = sum((outcome.ended for outcome in outcomes), Counter[str]())
    table = Table(title=f"{made.total()} hostile peers; the others went away by themselves")
    for heading in ("", "peers", "ended by the server"):
        table.add_column(heading, justify="right" if heading else "left")
    for kind, count in made.items():
        table.add_row(kind, str(count), str(ended[kind]))
    console.print(table)


def add_row(table: Table, schedule: str, quiet: Outcome, disturbed: Outcome) -> bool:
    """Add what a schedule's rounds came to; say whether all is as it should be."""
    before, after = disturbed.resources
    every = [quiet.resources[1], before, after]
    equal = same(quiet.weights, disturbed.weights)
    growth = after.memory - before.memory
    table.add_row(
        schedule,
        f"{sum(quiet.seconds):.1f}",
        f"{sum(disturbed.seconds):.1f}",
        f"{sum(disturbed.seconds) / sum(quiet.seconds):.2f}",
        f"{disturbed.flood_seconds:.1f}",
        "equal" if equal else "DIFFERENT",
        " → ".join(f"{each.memory / 1e6:.1f}" for each in every),
        " → ".join(str(each.threads) for each in every),
        " → ".join(str(each.descriptors) for each in every),
    )
    left = after.threads > before.threads + _SPARE_THREADS
    left |= after.descriptors > before.descriptors
    return equal and not left and growth <= _MOST_GROWTH


def main() -> None:
    """Run both schedules."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="hostile peers")
    parser.add_argument("--steps", type=int, default=100, help="of each client in a round")
    arguments = parser.parse_args()
    # Inherited by the server's process, of which what is held is to be seen, and not what glibc
    # keeps in a heap for each of many threads; see bench.memory.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "2"}
    console, cores = Console(width=140), sorted(os.sched_getaffinity(0))
    own, other = {cores[0]}, {cores[-1]}
    schedules: list[Schedule] = ["serial", "client-batch"]
    table = Table(
        title="two rounds of three honest clients; the server's process without a flood, after the "
        "first, and after the second"
    )
    for heading in ("", "s undisturbed", "s beside it", "÷", "s of floods", "weights"):
        table.add_column(heading, justify="right" if heading else "left")
    for heading in ("MB", "threads", "descriptors"):
        table.add_column(heading, justify="right")
    outcomes, sound = [], True
    with tempfile.TemporaryDirectory() as directory:
        _SHAPE.save(Path(directory))
        train = TrainSettings(batch_size=_SHAPE.rows, accumulation=_SHAPE.micro_batches)
        job = Job(Path(directory), _SHAPE, arguments.steps, ADAPTER, train, random_examples)
        split = SplitSettings(wire_dtype="float32", frame_timeout=300.0)
        with (
            Worker(serve_rounds, own, job) as server,
            Worker(train_honest, own, [job] * len(HONEST), split) as honest,
            Worker(flood, other, _SHAPE.hidden) as hostile,
        ):
            bench = Bench(server, honest, hostile)
            for schedule in schedules:
                chosen = split.model_copy(update={"schedule": schedule})
                quiet = bench.run(chosen, 0, 0.0)
                peers = arguments.count // (_ROUNDS * len(schedules))
                outcomes.append(bench.run(chosen, peers, quiet.seconds[1]))
                sound &= add_row(table, schedule, quiet, outcomes[-1])
    print_kinds(console, outcomes)
    console.print(table)
    if not sound:
        raise SystemExit("the flood has left something behind")


if __name__ == "__main__":
    main()
