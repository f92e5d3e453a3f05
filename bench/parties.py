"""The processes that train in measurements: the whole model, or a block server and its clients."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from statistics import mean
from typing import Any

from bench.harness import ANSWER_SECONDS, BoundProcess, Side, gpu_bytes, wait_for_gpus
from bench.job import (
    LIFETIME,
    Course,
    TrainingJob,
    join_round,
    load_client_parts,
    load_server_part,
    open_model,
    start_block_server,
    whole_course,
)
from bench.proxy import Proxy
from split.client.split_model import SplitModel
from split.model.part import Part
from split.model.partition import PartyName
from split.protocol.tickets import Invitation
from split.settings import SplitSettings


class Processes(Side):
    """The processes of the whole model, or of a block server and its clients; ``stack`` ends them.

    With ``split``, there is a client for each job, and with ``together``, the clients are threads
    of one process. ``line`` is the one-way delay in seconds and the rate in Gbit/s of a proxy
    between server and clients. A turn consists of ``steps_per_turn`` consecutive optimizer steps.
    """

    def __init__(
        self,
        stack: ExitStack,
        name: str,
        jobs: Sequence[TrainingJob],
        split: SplitSettings | None,
        cores: Collection[int],
        *,
        server_cores: Collection[int] = (),
        line: tuple[float, float] | None = None,
        together: bool = False,
        steps_per_turn: int = 1,
    ) -> None:
        self._steps_per_turn = steps_per_turn
        groups = [jobs] if together else [[job] for job in jobs]
        self._clients = [
            stack.enter_context(BoundProcess(cores, Training, own, split)) for own in groups
        ]
        self._servers, proxies = list[BoundProcess](), list[BoundProcess]()
        if split is not None:
            server = stack.enter_context(
                BoundProcess(server_cores or cores, BenchServer, jobs, split)
            )
            self._servers, invitations = [server], server.ask(BenchServer.invite)
            if line is not None:
                every_core, address = os.sched_getaffinity(0), invitations[0].address
                proxies = [stack.enter_context(BoundProcess(every_core, Proxy, address, *line))]
                address = proxies[0].ask(Proxy.address)
                invitations = [replace(each, address=address) for each in invitations]
            each = iter(invitations)
            self._ask_clients(Training.begin, *([next(each) for _ in own] for own in groups))
        workers = [*self._clients, *self._servers, *proxies]
        super().__init__(name, [worker.pid for worker in workers])

    def step(self) -> float:
        """Run a turn until clients *and* server have finished it, and return the mean loss."""
        losses: list[float] = []
        for _ in range(self._steps_per_turn):
            for own in self._ask_clients(Training.steps, *[1] * len(self._clients)):
                losses += own
            for server in self._servers:
                server.ask(BenchServer.settle)
        return mean(losses)

    @property
    def server_pid(self) -> int:
        """The process id of the server."""
        return self._servers[0].pid

    def server_seconds(self) -> float:
        """Return the mean CPU seconds per turn of the server's process."""
        return mean(turn[len(self._clients)] for turn in self.cpu[self.warm_up :])

    def traffic_bytes(self) -> int:
        """End the round; return the bytes that all lanes have carried in both directions."""
        return sum(client.ask(Training.finish) for client in self._clients)

    def gpu_peaks(self) -> list[int]:
        """Return the peaks of GPU memory in bytes: of all clients, and of the server, if any."""
        clients = sum(client.ask(gpu_peak) for client in self._clients)
        return [clients, *(server.ask(gpu_peak) for server in self._servers)]

    def _ask_clients(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a method in all clients' processes concurrently; return the results."""
        calls = zip(self._clients, arguments, strict=True)
        answers = [client.submit(method, argument) for client, argument in calls]
        return [answer.result(ANSWER_SECONDS) for answer in answers]


def alternate(sides: Sequence[Processes], turns: int) -> None:
    """Measure all sides in turn."""
    for _ in range(turns):
        for side in sides:
            side.start()
            side.losses.append(side.step())
            side.stop()


class Training:
    """Models that train in this process, each in a thread, some steps at a time.

    With ``split``, they are clients, one for each job. Without it, each is a whole model.
    """

    def __init__(self, jobs: Sequence[TrainingJob], split: SplitSettings | None = None) -> None:
        self._jobs, self._split = jobs, split
        self._threads = ThreadPoolExecutor(len(jobs))
        if split is None:
            self._courses = [whole_course(job) for job in jobs]
        else:
            self._ends = [load_client_parts(job, split) for job in jobs]

    def begin(self, invitations: Sequence[Invitation]) -> None:
        """Let each client join the round with its own invitation."""
        self._lanes = ExitStack()
        self._models = list(self._threads.map(self._join, self._ends, self._jobs, invitations))
        self._courses = [
            Course(job, model, model.parameters)
            for job, model in zip(self._jobs, self._models, strict=True)
        ]

    def _join(
        self, ends: Mapping[PartyName, Part], job: TrainingJob, invitation: Invitation
    ) -> SplitModel:
        assert self._split is not None
        model = self._lanes.enter_context(open_model(ends, invitation, job, self._split))
        join_round(model, job)
        return model

    def steps(self, count: int) -> list[float]:
        """Train ``count`` steps of each model, and return their mean losses."""
        losses = list(self._threads.map(lambda course: mean(course.train(count)), self._courses))
        wait_for_gpus()
        return losses

    def finish(self) -> int:
        """End the round, and return the bytes that all lanes have carried in both directions."""
        list(self._threads.map(lambda model: model.end(), self._models))
        self._lanes.close()
        each = [model.lane.traffic for model in self._models]
        return sum(traffic.bytes_up + traffic.bytes_down for traffic in each)


class BenchServer:
    """A block server in this process, with a lane for each client."""

    def __init__(
        self, jobs: Sequence[TrainingJob], split: SplitSettings, body: Part | None = None
    ) -> None:
        job, self._names = jobs[0], [f"client-{number}" for number in range(len(jobs))]
        body, self._seed = body or load_server_part(job, split), job.seed
        self._server = start_block_server(body=body, job=job, split=split, clients=len(jobs))
        self._server.begin_round(dict.fromkeys(self._names, 1), job.seed)

    def invite(self) -> list[Invitation]:
        """Return each client's invitation to train."""
        invite = self._server.invite_to_train
        return [invite(name, 1, self._seed, LIFETIME) for name in self._names]

    def invite_to_evaluate(self) -> list[Invitation]:
        """Return each client's invitation to ``base`` and, with the initial adapter, ``global``."""
        models = {"base": None, "global": self._server.state_of(self._names[0])}
        invite = self._server.invite_to_evaluate
        return [invite(name, 0, models, LIFETIME) for name in self._names]

    def settle(self) -> None:
        """Wait until all work is done."""
        # The request waits in the compute thread's queue until the optimizer step is done.
        self._server.state_of(self._names[0])
        wait_for_gpus()

    def finish(self) -> None:
        """End the round; exit if a lane failed."""
        errors = [account.error for account in self._server.finish_lanes() if account.error]
        self._server.stop()
        if errors:
            raise SystemExit(errors[0])


def gpu_peak(_: object) -> int:
    """Return the peak bytes of tensors on GPUs since the start of this process."""
    return gpu_bytes()
