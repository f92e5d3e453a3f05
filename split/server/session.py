"""The base of training and evaluation sessions: jobs, waiting for frames, and an account."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from split.lane.lane import Lane
from split.protocol.errors import FrameError, LaneError, LaneTimeoutError
from split.protocol.frames import Frame, Kind
from split.server.compute import ComputeThread, Job, Priority
from split.settings import SplitSettings

POLL_SECONDS = 1.0


@dataclass
class Account:
    """The use of a client's lane, and its costs.

    Attributes:
        client: Name of the client.
        purpose: ``train`` or ``evaluate``.
        steps: Finished optimizer steps.
        tokens: Padded tokens whose forward pass was computed.
        bytes_up: Bytes from the client, on the wire.
        bytes_down: Bytes to the client.
        seconds_computing: Time of the compute thread; with a GPU until the work is queued there.
        seconds_queued: Time that jobs waited for the compute thread.
        seconds_crypto: Time spent on encrypting and decrypting records, at the server.
        seconds_serialisation: Time spent on packing and unpacking tensors, at the server.
        seconds: Time from the handshake to the end.
        resumed: How often the lane was cut and resumed.
        capped: How often a number of the client was scaled down (``split.share-cap``).
        error: Reason for an early end; empty without one.

    """

    client: str
    purpose: str
    steps: int = 0
    tokens: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds_computing: float = 0.0
    seconds_queued: float = 0.0
    seconds_crypto: float = 0.0
    seconds_serialisation: float = 0.0
    seconds: float = 0.0
    resumed: int = 0
    capped: int = 0
    error: str = ""


class Session:
    """One lane at the server.

    Args:
        lane: Lane to the client; the handshake is over.
        purpose: ``train`` or ``evaluate``.
        compute: Runs the session's jobs.
        split: Seconds to wait for the client's next frame, and if others wait for room that the
            client holds.
        lifetime: Seconds from its invitation to the end of the phase of the round.

    Attributes:
        account: Account of the lane.
        lane: Lane to the client.
        compute: Runs the session's jobs.
        lifetime: Seconds from its invitation to the end of the phase of the round.

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
        # Seconds of silence in which others waited for room that the client holds: since its last
        # frame, in this step or generation, and in all.
        self._kept_once = self._kept_in_step = self._kept_in_all = 0.0
        self._turn_since = time.monotonic()  # when the last of its jobs ended
        self._owed = 0
        self._lock = threading.Lock()

    def count_traffic(self) -> None:
        """Copy the lane's traffic to the account."""
        traffic = self.lane.traffic
        self.account.bytes_up = traffic.bytes_up
        self.account.bytes_down = traffic.bytes_down
        self.account.seconds_crypto = traffic.seconds_crypto
        self.account.seconds_serialisation = traffic.seconds_serialisation
        self.account.resumed = self.lane.opened - 1

    def failed(self, error: BaseException) -> None:
        """End the lane after one of its jobs has raised."""
        with self._lock:
            self._owed -= 1
        # The lane's own thread notices that it has ended.
        if not isinstance(error, LaneError) or isinstance(error, FrameError):
            self.give_up(f"{type(error).__name__}: {error}")

    def put(self, priority: Priority, work: Callable[[], None], tokens: int = 0) -> None:
        """Queue a job that takes ``tokens`` of the activation budget, and account for its time."""
        queued = time.perf_counter()

        def run() -> None:
            started = time.perf_counter()
            work()
            self.account.seconds_queued += started - queued
            self.account.seconds_computing += time.perf_counter() - started
            with self._lock:
                self._owed -= 1
                self._turn_since = time.monotonic()

        with self._lock:
            self._owed += 1
        self.compute.put(Job(owner=self, priority=priority, run=run, tokens=tokens))

    def answer(self, step: int, index: int, states: torch.Tensor) -> None:
        """Send the hidden states of a micro-batch after the body."""
        self.lane.send(
            Kind.HIDDEN, step=step, micro_batch=index, tensors={"hidden": states.detach()}
        )

    def dispatch(
        self,
        event_of: Callable[[Frame], object],
        handlers: Mapping[type, Callable[[Any], None]],
    ) -> None:
        """Handle the client's frames until the last one.

        Args:
            event_of: Checks a frame; returns None if it is the last one.
            handlers: Handlers by the type of their events.

        Raises:
            LaneError: The lane has ended, or the client was silent for too long.
            ProtocolError: The client sent something that it may not send now.

        """
        while (event := event_of(self.receive())) is not None:
            handlers[type(event)](event)

    def receive(self) -> Frame:
        """Wait for the client's next frame; without limit while one of its jobs is due.

        While others wait for room in the activation budget, a client that holds some may be silent
        for ``gather_timeout`` at once, for ``frame_timeout`` in a whole step or generation, and for
        half of ``lifetime`` in all, however many frames it sends in between.

        Raises:
            LaneError: The lane has ended, or the client was silent for too long.

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
            if wanted and not self.waits() and self.holds():
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
        """Whether it is not the client's turn to send a frame."""
        with self._lock:
            return self._owed > 0

    def holds(self) -> bool:
        """Whether the client holds room in the activation budget that it alone can free."""
        return False

    def abandon(self, reason: str) -> None:
        """End the lane from another thread."""
        self.lane.close(reason)

    def give_up(self, reason: str) -> None:
        """End the lane, and tell the client the reason."""
        self.account.error = self.account.error or reason
        self.lane.close(reason)

    def _count_waiting(self, seconds: float) -> None:
        """Count seconds of the client's silence in which others waited for room that it holds.

        Raises:
            LaneTimeoutError: They have waited for too long.

        """
        seconds = max(0.0, seconds)
        self._kept_once += seconds
        self._kept_in_step += seconds
        self._kept_in_all += seconds
        for kept, most, setting in (
            (self._kept_once, self._gather_timeout, "split.gather-timeout"),
            (self._kept_in_step, self._frame_timeout, "split.frame-timeout"),
            (self._kept_in_all, self.lifetime / 2, "half of round-timeout"),
        ):
            if kept >= most:
                client = self.account.client
                raise LaneTimeoutError(
                    f"others waited {kept:.1f} s for room that {client} holds ({setting})"
                )
