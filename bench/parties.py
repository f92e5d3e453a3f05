"""The training processes: the whole model, or a block server and its clients."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from statistics import mean
from threading import Thread
from typing import Any

import torch

from bench.harness import Side, Worker, ask_all
from bench.job import (
    LIFETIME,
    Job,
    join,
    load_body,
    load_ends,
    load_whole,
    open_model,
    serving,
    train,
)
from bench.proxy import forward
from finetuning.adapters.adapter import trainable_parameters
from finetuning.data.batching import MicroBatch
from finetuning.model.whole_model import WholeModel
from finetuning.training.loop import Stages
from split.model.part import Part
from split.model.partition import PartyName
from split.settings import SplitSettings

_MEMORY, _ACCOUNTS = "memory", "accounts"


class Whole(Side):
    """The whole model in a process of its own, which ``stack`` ends."""

    def __init__(self, stack: ExitStack, job: Job, cores: Collection[int]) -> None:
        self._worker = stack.enter_context(Worker(_train_whole, cores, job))
        self._worker.receive()
        super().__init__("centralised", [self._worker.pid])

    def step(self) -> float:
        """Run an optimizer step, and return its loss."""
        return float(self._worker.ask(1))

    def gpu_peaks(self) -> list[int]:
        """Return the peak of GPU memory in bytes, after the last step."""
        return [self._worker.ask(_MEMORY)]


class Split(Side):
    """A block server and its clients, each in a process of its own, which ``stack`` ends.

    There is a client for each job. With ``together``, the clients are threads of one process.
    ``line`` is the one-way delay in seconds and the rate in Gbit/s of a proxy between server and
    clients. A turn consists of ``steps_per_turn`` consecutive optimizer steps.
    """

    def __init__(
        self,
        stack: ExitStack,
        name: str,
        jobs: Sequence[Job],
        split: SplitSettings,
        *,
        server_cores: Collection[int],
        client_cores: Collection[int],
        line: tuple[float, float] | None = None,
        together: bool = False,
        steps_per_turn: int = 1,
    ) -> None:
        self._steps_per_turn = steps_per_turn
        self._server = stack.enter_context(Worker(serve_clients, server_cores, jobs, split))
        groups = [jobs] if together else [[job] for job in jobs]
        self._clients = [
            stack.enter_context(Worker(train_clients, client_cores, group, split))
            for group in groups
        ]
        workers, invitations = [*self._clients, self._server], self._server.receive()
        if line is not None:
            every_core, address = os.sched_getaffinity(0), invitations[0].address
            workers.append(stack.enter_context(Worker(forward, every_core, address, *line)))
            address = workers[-1].receive()
            invitations = [replace(each, address=address) for each in invitations]
        each = iter(invitations)
        ask_all(self._clients, [[next(each) for _ in group] for group in groups])
        super().__init__(name, [worker.pid for worker in workers])

    def step(self) -> float:
        """Run a step of every client, until clients *and* server have finished it."""
        losses: list[float] = []
        for _ in range(self._steps_per_turn):
            for each in ask_all(self._clients, [1] * len(self._clients)):
                losses += each
            self._server.ask()
        return mean(losses)

    def accounts(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the time accounts of the round at the clients and at the server."""
        own = ask_all(self._clients, [_ACCOUNTS] * len(self._clients))
        return [account for each in own for account in each], self._server.ask(_ACCOUNTS)

    def gpu_peaks(self) -> list[int]:
        """Return the peaks of GPU memory in bytes: of all clients, and of the server."""
        clients = ask_all(self._clients, [_MEMORY] * len(self._clients))
        return [sum(clients), self._server.ask(_MEMORY)]


def alternate(sides: Sequence[Whole | Split], turns: int) -> None:
    """Measure all sides in turn."""
    for _ in range(turns):
        for side in sides:
            side.start()
            loss = side.step()
            side.stop()
            side.losses.append(loss)


def _train_whole(link: Connection, job: Job) -> None:
    """Train the whole model in turns, and finally answer with the peak GPU memory."""
    peft_model = load_whole(job)
    _train_in_turns(link, WholeModel(peft_model), trainable_parameters(peft_model), job)
    link.recv()
    link.send(_peak_gpu_memory())


def train_clients(link: Connection, jobs: Sequence[Job], split: SplitSettings) -> None:
    """Train clients, each in a thread; the first message is their invitations.

    This message is answered when all clients have joined. A number of steps is answered with the
    clients' mean losses, ``memory`` with the peak GPU memory, and ``accounts``, after the last
    step, with each client's account of the round.
    """
    links = []
    for job in jobs:
        own, other = Pipe()
        arguments = (other, load_ends(job, split), job, split)
        Thread(target=_run_client, args=arguments, daemon=True).start()
        links.append(own)
    link.send(_ask_clients(links, link.recv()))
    while True:
        message = link.recv()
        if message == _MEMORY:
            link.send(_peak_gpu_memory())
        else:
            link.send(_ask_clients(links, [message] * len(links)))


def _ask_clients(links: Sequence[Connection], messages: Sequence[Any]) -> list[Any]:
    for link, message in zip(links, messages, strict=True):
        link.send(message)
    answers = [link.recv() for link in links]
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _run_client(
    link: Connection, ends: Mapping[PartyName, Part], job: Job, split: SplitSettings
) -> None:
    try:
        with open_model(ends, link.recv(), job, split) as model:
            join(model, job)
            started = time.thread_time()
            _train_in_turns(link, model, model.parameters, job)
            computing = time.thread_time() - started
            model.end()
        link.recv()
        account = asdict(model.lane.traffic)
        account |= {"seconds_computing": computing, "seconds_waiting": model.seconds_waiting}
        link.send(account)
    except (EOFError, BrokenPipeError):
        pass  # the process is ending
    except Exception as error:
        link.send(error)


def serve_clients(
    link: Connection, jobs: Sequence[Job], split: SplitSettings, body: Part | None = None
) -> None:
    """Serve clients; the first message of this process is their invitations.

    ``memory`` is answered with the peak GPU memory, ``accounts`` ends the round and is answered
    with the server's accounts, and any other message is answered when all work is done.
    """
    names = [f"client-{number}" for number in range(len(jobs))]
    body, seed = body or load_body(jobs[0], split), jobs[0].seed
    with serving(body=body, job=jobs[0], split=split, clients=len(jobs)) as server:
        server.begin_round(dict.fromkeys(names, 1), seed)
        link.send([server.invite_to_train(name, 1, seed, LIFETIME) for name in names])
        while (message := link.recv()) != _ACCOUNTS:
            if message == _MEMORY:
                link.send(_peak_gpu_memory())
                continue
            # This goes through the compute thread's queue, so it returns after the optimizer step.
            server.state_of(names[0])
            _wait_for_gpus()
            link.send(None)
        link.send([asdict(account) for account in server.finish_lanes()])


def _train_in_turns(
    link: Connection, model: Stages, parameters: Mapping[str, torch.nn.Parameter], job: Job
) -> None:
    """Train; each message is a number of steps, answered with their mean loss.

    The first answer, before any step, confirms that the model is loaded.
    """
    turns = _Turns(model, link)
    train(job, turns, parameters)
    turns.answer()


class _Turns:
    """The stages of a model, which wait for a message before each step."""

    def __init__(self, stages: Stages, link: Connection) -> None:
        self._stages, self._link = stages, link
        self._remaining = 0
        self._losses: list[float] = []

    @property
    def columns_before(self) -> int:
        return self._stages.columns_before

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        if not self._remaining:
            self.answer()
            self._remaining = self._link.recv()
        self._remaining -= 1
        losses = self._stages.accumulate(batches, seed)
        self._losses.append(sum(losses) / sum(len(batch.labels) for batch in batches))
        return losses

    def clip(self, maximum: float) -> float:
        return self._stages.clip(maximum)

    def answer(self) -> None:
        _wait_for_gpus()
        self._link.send(mean(self._losses) if self._losses else None)
        self._losses = []


def _wait_for_gpus() -> None:
    """Wait until all work queued on this process's GPUs is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(number):  # synchronising would initialise unused GPUs
                torch.cuda.synchronize(number)


def _peak_gpu_memory() -> int:
    """Return the peak bytes of tensors on GPUs since the start of the process."""
    numbers = range(torch.cuda.device_count())
    return sum(torch.cuda.max_memory_allocated(number) for number in numbers)
