"""The compute thread, which runs the jobs of all clients from one queue."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol, TypeVar

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
# Seconds in the queue after which a job can no longer be overtaken.
_PATIENCE = 2.0


class Priority(IntEnum):
    """Priorities of jobs: first jobs that free memory, then jobs that clients wait for."""

    CLEANUP = 0
    BACKWARD = 1
    STEP = 2
    FORWARD = 3  # also of a generation's prompts, so that other forward passes don't delay them


class JobOwner(Protocol):
    """The owner of jobs, which is notified of their errors."""

    def failed(self, error: BaseException) -> None:
        """Handle an exception that a job raised."""


@dataclass(eq=False)
class Job:
    """A computation that the compute thread runs.

    A job takes ``tokens`` padded tokens from the activation budget. The owner must return them with
    ``release``, even if the job failed.
    """

    owner: JobOwner
    priority: Priority
    work: Callable[[], None]
    tokens: int = 0
    detail: Any = None  # data with which another job can do this job's work, too
    queued: float = 0.0  # time at which the job was queued, on the thread's clock

    def run(self) -> None:
        """Do the work; called in the compute thread."""
        self.work()


def first_ready(waiting: Sequence[Job], free_tokens: int, now: float) -> Job | None:
    """Return the next job to run, or None if no job can run without more activation budget.

    Return the oldest job of the highest priority. To prevent starvation, return the oldest job of
    any priority once it has waited for 2 seconds. Jobs that take tokens from the budget never
    overtake each other, even if only a newer job fits into the budget. All other jobs overtake
    jobs that wait for activation budget. The waiting jobs are in order of arrival, and ``now`` is a
    time on the clock of ``Job.queued``.
    """
    first = _first_with_tokens(waiting)
    ready = [
        job for job in waiting if not job.tokens or (job is first and job.tokens <= free_tokens)
    ]
    if ready and now - ready[0].queued >= _PATIENCE:
        return ready[0]
    return min(ready, key=lambda job: job.priority, default=None)


def _first_with_tokens(waiting: Sequence[Job]) -> Job | None:
    return next((job for job in waiting if job.tokens), None)


class ComputeThread:
    """Thread that runs jobs one at a time, so that only one thread uses the body.

    Activations of at most ``activation_budget`` padded tokens are in memory at once.

    Example:
        >>> import threading
        >>> class Owner:
        ...     def failed(self, error):
        ...         print("a job failed:", error)
        >>> compute, done = ComputeThread(activation_budget=100), threading.Event()
        >>> compute.put(Job(Owner(), Priority.FORWARD, done.set, tokens=60))
        >>> done.wait(10)
        True
        >>> compute.free_tokens
        40
        >>> compute.release(60)
        >>> compute.call(lambda: "the result of a function in the thread")
        'the result of a function in the thread'
        >>> compute.stop()
    """

    def __init__(self, activation_budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.free_tokens = activation_budget
        self.waiting: list[Job] = []  # in order of arrival
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="compute", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queue a job. The job fails if the thread has been stopped."""
        with self._changed:
            if not self._stopping:
                job.queued = self._clock()
                self.waiting.append(job)
                self._changed.notify()
                return
        job.owner.failed(RuntimeError("the block server has stopped"))

    def release(self, tokens: int) -> None:
        """Return tokens to the activation budget."""
        with self._changed:
            self.free_tokens += tokens
            self._changed.notify()

    def seconds_wanted(self, owner: JobOwner) -> float:
        """Return how many seconds another owner's job has waited for budget; 0.0 if none waits."""
        with self._changed:
            first = _first_with_tokens(self.waiting)
            if first is None or first.tokens <= self.free_tokens:
                return 0.0
            others = (job for job in self.waiting if job.tokens and job.owner is not owner)
            oldest = next(others, None)
            return 0.0 if oldest is None else self._clock() - oldest.queued

    def take_with(self, fits: Callable[[Job], bool], count: int, patience: float) -> list[Job]:
        """Remove and return waiting jobs that the current job can also do; the caller runs them.

        Each has a ``detail``, fits, and is its owner's oldest job. If no other job could run, wait
        for ``count`` such jobs, for at most ``patience`` seconds. Call this method in a job.
        """
        until = self._clock() + patience
        with self._changed:
            while True:
                oldest = {id(job.owner): job for job in reversed(self.waiting)}.values()
                taken = [job for job in oldest if job.detail is not None and fits(job)]
                left = until - self._clock()
                able = [job for job in self.waiting if job.tokens <= self.free_tokens]
                if len(taken) >= count or len(taken) < len(able) or left <= 0:
                    self.waiting = [job for job in self.waiting if job not in taken]
                    return taken
                self._changed.wait(left)

    def run(self, job: Job) -> None:
        """Run a job, and notify its owner of an error; called in the compute thread."""
        try:
            job.run()
        except Exception as error:
            _log.debug("a job failed", exc_info=error)
            job.owner.failed(error)

    def withdraw(self, owner: JobOwner) -> None:
        """Remove an owner's jobs that have not started."""
        with self._changed:
            self.waiting = [job for job in self.waiting if job.owner is not owner]

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the compute thread; return its result or raise its error."""
        call: _Call[Result] = _Call()
        self.put(Job(call, Priority.CLEANUP, lambda: call.set_result(function())))
        return call.result()

    def stop(self) -> None:
        """Stop the thread after the current job. Queued jobs fail."""
        with self._changed:
            self._stopping = True
            dropped, self.waiting = self.waiting, []
            self._changed.notify()
        self._thread.join()
        for job in dropped:
            job.owner.failed(RuntimeError("the block server is stopping"))

    def _work(self) -> None:
        while (job := self._take()) is not None:
            self.run(job)
            del job  # free the job's tensors while waiting for the next job

    def _take(self) -> Job | None:
        with self._changed:
            while not self._stopping:
                job = first_ready(self.waiting, self.free_tokens, self._clock())
                if job is not None:
                    self.waiting.remove(job)
                    self.free_tokens -= job.tokens
                    return job
                self._changed.wait()
            return None


class _Call(Future[Result]):
    """Owner of a job whose result another thread waits for."""

    failed = Future.set_exception
