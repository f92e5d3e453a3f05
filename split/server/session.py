"""Base class of training and evaluation sessions, with jobs, time limits and an account."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from finetuning.devices import memory_problem
from split.lane.lane import Lane
from split.protocol.errors import FrameError, LaneError, LaneTimeoutError
from split.protocol.frames import Frame, Kind
from split.server.compute import ComputeThread, Job, Priority
from split.server.passes import Passes
from split.settings import SplitSettings

POLL_SECONDS = 1.0
_MEMORY = (
    "at the server, lower split.activation-budget (chambers serve: --max-tokens), or use more GPUs "
    "(split.body-devices)"
)


def describe_lane_error(error: BaseException) -> str:
    """Return the description of a server's error that a client may see."""
    if isinstance(error, torch.OutOfMemoryError):
        return memory_problem(error, _MEMORY)
    return f"{type(error).__name__}: {error}"


@dataclass
class Account:
    """Resources that a client's lane has used at the server."""

    client: str
    purpose: str  # ``train`` or ``evaluate``
    steps: int = 0
    tokens: int = 0  # number of padded tokens of all forward passes
    bytes_up: int = 0  # number of bytes from the client, on the wire
    bytes_down: int = 0
    # Time of jobs; on a GPU and with stages, only until their work is enqueued.
    seconds_computing: float = 0.0
    seconds_queued: float = 0.0  # time that jobs waited for the compute thread
    seconds_crypto: float = 0.0
    seconds_serialisation: float = 0.0
    seconds: float = 0.0  # time from the handshake to the end of the lane
    resumed: int = 0  # number of times that the lane was cut and resumed
    capped: int = 0  # number of times that a value of the client was capped (``split.share-cap``)
    error: str = ""  # reason why the lane ended early; empty if it did not


class Session:
    """Base class for the server's side of one lane, whose jobs the compute thread runs.

    ``split`` contains time limits for the client's next frame, in general and while other clients
    wait for activation budget that the client occupies. ``lifetime`` is the number of seconds from
    the client's invitation to the end of this phase of the round.
    """

    def __init__(
        self,
        lane: Lane,
        purpose: str,
        compute: ComputeThread,
        split: SplitSettings,
        lifetime: float,
    ) -> None:
        self.account = Account(lane.identity.node, purpose)
        self.lane = lane
        self.compute = compute
        self.lifetime = lifetime
        self._frame_timeout = split.frame_timeout
        self._gather_timeout = split.gather_timeout
        # Seconds that the client was silent while other clients waited for activation budget that
        # it occupies: since its last frame, in this step or generation, and in total.
        self._kept_once = self._kept_in_step = self._kept_in_all = 0.0
        self._turn_since = time.monotonic()  # time at which the session's last job ended
        self._owed = 0  # number of jobs that are queued or running
        self._lock = threading.Lock()
        self.passes = Passes(compute, partial(self.put, Priority.CLEANUP))

    def count_traffic(self) -> None:
        """Copy the lane's traffic statistics to ``account``."""
        traffic = self.lane.traffic
        self.account.bytes_up = traffic.bytes_up
        self.account.bytes_down = traffic.bytes_down
        self.account.seconds_crypto = traffic.seconds_crypto
        self.account.seconds_serialisation = traffic.seconds_serialisation
        self.account.resumed = self.lane.opened - 1

    def failed(self, error: BaseException) -> None:
        """End the lane after one of the session's jobs raised an exception."""
        with self._lock:
            self._owed -= 1
        # Any LaneError except FrameError means that the lane has ended, which ``serve`` handles.
        if not isinstance(error, LaneError) or isinstance(error, FrameError):
            self.give_up(describe_lane_error(error))

    def put(
        self, priority: Priority, work: Callable[[], None], tokens: int = 0, detail: Any = None
    ) -> None:
        """Queue a job (see `Job`) that takes ``tokens`` from the budget, and record its times."""
        with self._lock:
            self._owed += 1
        self.compute.put(_SessionJob(self, priority, work, tokens, detail))

    def note_done(self, seconds_queued: float, seconds_computing: float) -> None:
        """Record the end of one of the session's jobs, and its times."""
        self.account.seconds_queued += seconds_queued
        self.account.seconds_computing += seconds_computing
        with self._lock:
            self._owed -= 1
            self._turn_since = time.monotonic()

    def answer(self, step: int, index: int, states: torch.Tensor) -> None:
        """Send the hidden states of a micro-batch after the body."""
        self.lane.send(
            Kind.HIDDEN, step=step, micro_batch=index, tensors={"hidden": states.detach()}
        )

    def receive(self) -> Frame:
        """Wait for the client's next frame, without a time limit while the server owes an answer.

        While other clients wait for activation budget, a client that occupies some of it may be
        silent for ``gather_timeout`` between two frames, for ``frame_timeout`` in total in a step
        or generation, and for half of ``lifetime`` in total. Raise a LaneError if the lane has
        ended, or the client was silent for too long.
        """
        silent_since = seen = time.monotonic()
        self._kept_once = 0.0
        poll = min(self._frame_timeout, POLL_SECONDS)
        while True:
            frame = None
            with suppress(LaneTimeoutError):
                frame = self.lane.receive(poll)
            now = time.monotonic()
            wanted = self.compute.seconds_wanted(self)
            if wanted and self.passes.held and not self.waits():
                self._count_waiting(min(wanted, now - max(seen, self._turn_since)))
            if frame is not None:
                return frame
            if self.waits():
                silent_since = now
            elif now - silent_since >= self._frame_timeout:
                raise LaneTimeoutError(
                    f"{self.account.client} sent nothing for {self._frame_timeout:g} s "
                    "(split.frame-timeout)"
                )
            seen = now

    def waits(self) -> bool:
        """Return whether the client need not send a frame, because the server owes an answer."""
        with self._lock:
            # ``pending`` doesn't change meanwhile: without jobs, nothing changes it.
            return self._owed > 0 or self.passes.pending > 0

    def give_up(self, reason: str) -> None:
        """End the lane with an error, and send the reason to the client."""
        self.account.error = self.account.error or reason
        self.lane.close(reason)

    def _count_waiting(self, seconds: float) -> None:
        """Count seconds of the client's silence while others waited for its activation budget."""
        seconds = max(0.0, seconds)
        self._kept_once += seconds
        self._kept_in_step += seconds
        self._kept_in_all += seconds
        for kept, limit, setting in (
            (self._kept_once, self._gather_timeout, "split.gather-timeout"),
            (self._kept_in_step, self._frame_timeout, "split.frame-timeout"),
            (self._kept_in_all, self.lifetime / 2, "half of round-timeout"),
        ):
            if kept >= limit:
                raise LaneTimeoutError(
                    f"other clients waited {kept:.1f} s for memory that {self.account.client} "
                    f"occupies ({setting})"
                )


@dataclass(eq=False)
class _SessionJob(Job):
    """A job of a session, which is told how long the job waited and computed."""

    owner: Session
    created: float = field(default_factory=time.perf_counter)

    def run(self) -> None:
        started = time.perf_counter()
        self.work()
        self.owner.note_done(started - self.created, time.perf_counter() - started)
