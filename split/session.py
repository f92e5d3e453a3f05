"""What serving a lane takes, whatever it is for: its jobs, its waits, its account."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from split.compute import ComputeThread, Job, Urgency
from split.frames import Frame, Kind
from split.lane import Lane
from split.lane_errors import LaneTimeoutError
from split.parts import Padding


class ProtocolError(RuntimeError):
    """The client sent what it may not send now; its lane ends."""


@dataclass
class Account:
    """What a lane did and what it cost.

    Attributes:
        client: whose.
        purpose: ``train`` or ``evaluate``.
        steps: optimizer steps that were finished.
        tokens: padded tokens whose forward pass was computed.
        bytes_up: from the client, on the wire.
        bytes_down: to the client.
        seconds_computing: in the compute thread.
        seconds_queued: that jobs waited for it.
        seconds_crypto: sealing and opening records, at the server.
        seconds_serialisation: packing and unpacking tensors, at the server.
        seconds: from the handshake to the end.
        error: why it ended early; empty if it didn't.

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
    error: str = ""


class Session:
    """One lane at the server.

    Args:
        lane: to the client; the handshake is over.
        purpose: ``train`` or ``evaluate``.
        compute: runs its jobs.
        frame_timeout: seconds to wait for the client's next frame.

    """

    def __init__(
        self, lane: Lane, purpose: str, compute: ComputeThread, frame_timeout: float
    ) -> None:
        self.account = Account(lane.identity.node, purpose)
        self.lane = lane
        self.compute = compute
        self._frame_timeout = frame_timeout
        self._owed = 0
        self._lock = threading.Lock()

    def failed(self, error: BaseException) -> None:
        """End the lane: one of its jobs raised."""
        with self._lock:
            self._owed -= 1
        self.account.error = self.account.error or f"{type(error).__name__}: {error}"
        self.lane.close(self.account.error)

    def put(self, urgency: Urgency, work: Callable[[], None], tokens: int = 0) -> None:
        """Queue a job whose activations take so many tokens of the budget, and note its times."""
        queued = time.perf_counter()

        def run() -> None:
            started = time.perf_counter()
            work()
            self.account.seconds_queued += started - queued
            self.account.seconds_computing += time.perf_counter() - started
            with self._lock:
                self._owed -= 1

        with self._lock:
            self._owed += 1
        self.compute.put(Job(self, urgency, run, tokens))

    def receive(self) -> Frame:
        """Wait for the client's next frame, without limit while it waits for a job of its own.

        Raises:
            LaneError: the lane broke, or the client was silent for too long.

        """
        while True:
            try:
                return self.lane.receive(self._frame_timeout)
            except LaneTimeoutError:
                with self._lock:
                    if not self._owed:
                        raise


def hidden_of(frame: Frame) -> tuple[torch.Tensor, Padding]:
    """Read hidden states and their padding; the lane has checked shapes and lengths."""
    side: Literal["left", "right"] = "left" if frame.fields.get("side") == "left" else "right"
    return frame.tensors["hidden"], Padding(side, frame.tensors["lengths"].long())


def whole_number(frame: Frame, name: str) -> int:
    """Read a field that must be a whole number of at least 0.

    Raises:
        ProtocolError: it isn't.

    """
    value = frame.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProtocolError(f"{name} = {value!r} in a frame {Kind(frame.kind).name}")
    return value
