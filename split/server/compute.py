"""The compute thread: it runs the jobs of all clients from one queue."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class Priority(IntEnum):
    """Priorities of jobs: first those that free memory, then those that clients wait for.

    The last two count as one, so that evaluating a loss doesn't keep others' generations waiting.
    """

    CLEANUP = 0
    BACKWARD = 1
    STEP = 2
    FORWARD = 3
    GENERATION = 4  # holds memory for longer than a step


class JobOwner(Protocol):
    """The owner of jobs; only it is notified of their errors."""

    def failed(self, error: BaseException) -> None:
        """Handle an exception that a job has raised."""
        ...


@dataclass
class Job:
    """A computation.

    Attributes:
        owner: Owner, which is notified of an error.
        priority: Priority; jobs with lower numbers run first, those with the same number in order
            of arrival.
        run: The computation.
        tokens: Padded tokens that the job takes of the activation budget. The owner must return
            them with ``release``, whether the job failed or not.

    """

    owner: JobOwner
    priority: Priority
    run: Callable[[], None]
    tokens: int = 0


def first_ready(waiting: Sequence[Job], free_tokens: int) -> Job | None:
    """Return the next job: the oldest of the highest priority, or None if it must wait for room.

    No job overtakes an older one of the same priority, even if only the younger one fits into the
    activation budget; but forward passes that take nothing of it overtake generations that wait.
    """
    job = min(waiting, key=_rank, default=None)
    if job is None or job.tokens <= free_tokens:
        return job
    if job.priority is not Priority.GENERATION:
        return None
    passing = (each for each in waiting if each.priority is Priority.FORWARD and not each.tokens)
    return next(passing, None)


def _rank(job: Job) -> Priority:
    return min(job.priority, Priority.FORWARD)


class ComputeThread:
    """Runs jobs one at a time, so that only one thread uses the body.

    Args:
        activation_budget: Padded tokens whose activations may exist at once.

    """

    def __init__(self, activation_budget: int) -> None:
        self._free = activation_budget
        self._waiting: list[Job] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job; it fails if the thread is stopped."""
        with self._changed:
            stopping = self._stopping
            if not stopping:
                self._waiting.append(job)
                self._changed.notify()
        if stopping:
            job.owner.failed(RuntimeError("the block server has stopped"))

    def release(self, tokens: int) -> None:
        """Return tokens to the activation budget."""
        with self._changed:
            self._free += tokens
            self._changed.notify()

    def keeps_waiting(self, owner: JobOwner) -> bool:
        """Whether the next job is another owner's, and waits for room in the activation budget."""
        with self._changed:
            job = min(self._waiting, key=_rank, default=None)
            return job is not None and job.owner is not owner and job.tokens > self._free

    def withdraw(self, owner: JobOwner) -> None:
        """Remove the owner's jobs that have not started."""
        with self._changed:
            self._waiting = [job for job in self._waiting if job.owner is not owner]

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the thread, wait for it, and return its result or raise its error."""
        done = threading.Event()
        result: list[Result] = []
        caller = _Caller(done)

        def run() -> None:
            result.append(function())
            done.set()

        self.put(Job(caller, Priority.CLEANUP, run))
        done.wait()
        if caller.error is not None:
            raise caller.error
        return result[0]

    def stop(self) -> None:
        """End the thread after the current job; queued jobs fail."""
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
            del job  # frees its tensors while waiting for the next one

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
    """The owner of a job that another thread waits for."""

    def __init__(self, done: threading.Event) -> None:
        self.error: BaseException | None = None
        self._done = done

    def failed(self, error: BaseException) -> None:
        self.error = error
        self._done.set()
