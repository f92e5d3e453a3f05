"""The thread that computes: all lanes' jobs go through one queue before the device."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Urgency(IntEnum):
    """What goes first: whatever frees memory, then what clients wait for."""

    CLEANING = 0
    BACKWARD = 1
    STEP = 2
    FORWARD = 3
    KEEPING = 4  # takes memory for longer than a step


class Owner(Protocol):
    """Whose job it is; an error in a job is its owner's alone."""

    def failed(self, error: BaseException) -> None:
        """Take note that a job raised."""
        ...


@dataclass
class Job:
    """Something to compute.

    Attributes:
        owner: whose it is.
        urgency: jobs of lower numbers go first, those of the same number in order of arrival.
        tokens: padded tokens of whose activations it takes the place, until ``release`` is called;
            it must be, by the owner, whether the job failed or not.
        run: does it.

    """

    owner: Owner
    urgency: Urgency
    run: Callable[[], None]
    tokens: int = 0


def first_ready(waiting: Sequence[Job], free_tokens: int) -> Job | None:
    """Choose the job that runs next: the most urgent, and of these the oldest.

    One that doesn't fit into the activation budget has all younger ones wait: nobody is overtaken.
    """
    job = min(waiting, key=lambda job: job.urgency, default=None)
    return job if job is not None and job.tokens <= free_tokens else None


class ComputeThread:
    """Runs jobs one at a time, so that nothing else ever touches the body.

    Args:
        activation_budget: padded tokens whose activations may exist at once.

    """

    def __init__(self, activation_budget: int) -> None:
        self._free = activation_budget
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; it fails if the thread has been stopped."""
        with self._changed:
            stopping = self._stopping
            if not stopping:
                self._waiting.append(job)
                self._changed.notify()
        if stopping:
            job.owner.failed(RuntimeError("the block server has stopped"))

    def release(self, tokens: int) -> None:
        """Give activations' place back."""
        with self._changed:
            self._free += tokens
            self._changed.notify()

    def withdraw(self, owner: Owner) -> None:
        """Remove an owner's jobs that have not begun."""
        with self._changed:
            self._waiting = [job for job in self._waiting if job.owner is not owner]

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread, wait for it, and give or raise what comes of it."""
        done = threading.Event()
        result: list[Result] = []
        caller = _Caller(done)

        def run() -> None:
            result.append(function())
            done.set()

        self.put(Job(caller, Urgency.CLEANING, run))
        done.wait()
        if caller.error is not None:
            raise caller.error
        return result[0]

    def stop(self) -> None:
        """End the thread after the job that it is at; those that wait fail."""
        with self._changed:
            self._stopping = True
            dropped, self._waiting = self._waiting, []
            self._changed.notify()
        self._thread.join()
        for job in dropped:
            job.owner.failed(RuntimeError("the block server is stopping"))

    def _work(self) -> None:
        while (job := self._take()) is not None:
            try:
                job.run()
            except Exception as error:
                _log.debug("a job failed", exc_info=error)
                job.owner.failed(error)
            del job  # and the tensors that it holds, while waiting for the next

    def _take(self) -> Job | None:
        with self._changed:
            while not self._stopping:
                job = first_ready(self._waiting, self._free)
                if job is not None:
                    self._waiting.remove(job)
                    self._free -= job.tokens
                    return job
                self._changed.wait()
            return None


class _Caller:
    """Owner of a job that another thread waits for."""

    def __init__(self, done: threading.Event) -> None:
        self.error: BaseException | None = None
        self._done = done

    def failed(self, error: BaseException) -> None:
        self.error = error
        self._done.set()
