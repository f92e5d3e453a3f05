"""The processes that measurements of split learning consist of: client, server, whole model.

Each is started with the cores that it may use, before it has any thread, and is told over a pipe
when to take its next step. Between its steps it waits and uses no processor.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.gpu_state import peak_gpu_memory, wait_for_gpus
from bench.split_job import (
    LIFETIME,
    SEED,
    Job,
    load_body,
    load_ends,
    load_whole,
    open_lane,
    serving,
)
from finetuning.adapters.adapter import trainable_parameters
from finetuning.data.batching import MicroBatch
from finetuning.model.whole_model import WholeModel
from finetuning.settings import SplitSettings
from finetuning.training.loop import Stages, train_round
from split.model.cut import PartyName
from split.model.part import Part

_PATIENCE = 900.0
_STOP_SECONDS = 10.0
_SPAWN = get_context("spawn")


class Worker:
    """A process that answers one message after another; used in a ``with`` statement.

    Args:
        role: what it runs, given its end of the pipe and the arguments.
        cores: that it may use.
        arguments: of the role.

    """

    def __init__(self, role: Callable[..., None], cores: Collection[int], *arguments: Any) -> None:
        self._link, other = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_enter, args=(role, other, arguments), daemon=True)
        # A child inherits them, so that every thread it ever has is bound to its cores.
        os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        try:
            self._process.start()
        finally:
            os.sched_setaffinity(0, before)
        other.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        assert self._process.pid is not None
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message; its answer is fetched by ``receive``."""
        self._link.send(message)

    def receive(self) -> Any:
        """Wait for what the process says next.

        Raises:
            SystemExit: it failed, or said nothing for a quarter of an hour.

        """
        if not self._link.poll(_PATIENCE):
            raise SystemExit(f"process {self.pid} said nothing for {_PATIENCE:g} s")
        try:
            message = self._link.recv()
        except EOFError:
            raise SystemExit(f"process {self.pid} ended unexpectedly") from None
        if isinstance(message, _Failure):
            raise SystemExit(message.text)
        return message

    def ask(self, message: Any = None) -> Any:
        """Send a message and wait for its answer."""
        self.send(message)
        return self.receive()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._link.close()  # a process that waits for a message ends by itself
        if kind is None:
            self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclass(frozen=True)
class _Failure:
    text: str


def _enter(role: Callable[..., None], link: Connection, arguments: tuple[Any, ...]) -> None:
    """Run a role as a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    torch.set_num_threads(1)
    try:
        role(link, *arguments)
    except (EOFError, BrokenPipeError):
        pass  # the other end is closed: nobody wants anything any more
    except Exception as error:
        link.send(_Failure(f"{role.__name__}: {type(error).__name__}: {error}"))
        raise


class _Turns:
    """The stages of a model; each step begins when a message says so, and ends with an answer.

    The answer is the step's loss. The first one, before any step, says that all is loaded.
    """

    def __init__(self, stages: Stages, link: Connection) -> None:
        self._stages, self._link = stages, link
        self._loss = float("nan")

    @property
    def columns_before(self) -> int:
        return self._stages.columns_before

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        self.finish()
        self._link.recv()
        losses = self._stages.accumulate(batches, seed)
        self._loss = sum(losses) / sum(len(batch.labels) for batch in batches)
        return losses

    def clip(self, maximum: float) -> float:
        return self._stages.clip(maximum)

    def finish(self) -> None:
        wait_for_gpus()
        self._link.send(self._loss)


def train_whole(link: Connection, job: Job) -> None:
    """Train the whole model, a step per message; the last answer is the peak of GPU memory."""
    peft_model = load_whole(job)
    _train(link, WholeModel(peft_model), trainable_parameters(peft_model), job)
    link.recv()
    link.send(peak_gpu_memory())


def train_split(link: Connection, job: Job, split: SplitSettings) -> None:
    """Train head and tail, a step per message; the first message is the invitation.

    Its last answer is what the client's round took, beside what the server knows.
    """
    train_ends(link, load_ends(job, split), job, split)


def train_ends(
    link: Connection, ends: Mapping[PartyName, Part], job: Job, split: SplitSettings
) -> None:
    """Train a head and a tail that are loaded; see ``train_split``."""
    model, lane = open_lane(ends, link.recv(), job, split)
    started = time.thread_time()
    _train(link, model, model.parameters, job)
    computing = time.thread_time() - started
    model.end()
    link.recv()
    waiting = model.seconds_waiting
    link.send(asdict(lane.traffic) | {"seconds_computing": computing, "seconds_waiting": waiting})


def _train(
    link: Connection, model: Stages, parameters: Mapping[str, torch.nn.Parameter], job: Job
) -> None:
    turns = _Turns(model, link)
    train_round(turns, parameters, job.examples(job), 0, job.place(), job.train)
    turns.finish()


def serve(link: Connection, job: Job, split: SplitSettings) -> None:
    """Serve one client; give its invitation, answer when all work is done, and last its account."""
    with serving(load_body(job, split), job, split, ["client"]) as server:
        link.send(server.invite_to_train("client", 1, SEED, LIFETIME))
        while link.recv() == "settle":
            # Goes through the queue, so that the optimizer's work is done when it answers.
            server.end_round({"client": 1.0})
            link.send(None)
        (account,) = server.finish_lanes()
        link.send(asdict(account))
