"""The server's frames at a client: waited for, and checked to be those that are due."""

import math
import time
from collections.abc import Mapping

import torch

from split.lane.lane import Lane
from split.protocol.errors import LaneError, LaneTimeoutError
from split.protocol.frames import Frame, Kind, Value

_OF_A_STEP = {Kind.HIDDEN, Kind.STEP, Kind.AVERAGE}


class Answers:
    """The frames that the server sends over a lane.

    Args:
        lane: Lane to the block server.
        frame_timeout: Seconds to wait for the server's next frame.

    Attributes:
        seconds_waiting: Time spent waiting for frames.

    """

    def __init__(self, lane: Lane, frame_timeout: float) -> None:
        self.seconds_waiting = 0.0
        self._lane = lane
        self._frame_timeout = frame_timeout

    def receive(
        self,
        kind: Kind,
        step: int,
        until: float | None = None,
        also: Kind | None = None,
        micro_batch: int | None = None,
    ) -> Frame:
        """Wait for a frame of a kind.

        Args:
            kind: What is due.
            step: Present step; frames that belong to no step have 0.
            until: When to stop waiting, on ``time.monotonic``'s clock; None is ``frame_timeout``.
            also: Another kind that may come.
            micro_batch: The frame's, where only one can be due.

        Raises:
            LaneError: The lane has ended, no frame came in time, or one that is not due.

        """
        started = time.monotonic()
        timeout = self._frame_timeout if until is None else max(0.0, until - started)
        try:
            frame = self._lane.receive(timeout)
        except LaneTimeoutError:
            setting = "split.frame-timeout" if until is None else "round-timeout"
            raise LaneTimeoutError(
                f"the block server sent nothing for {timeout:.0f} s ({setting})"
            ) from None
        finally:
            self.seconds_waiting += time.monotonic() - started
        if frame.kind not in (kind, also):
            raise LaneError(f"the server sent a frame {frame.kind.name} where {kind.name} is due")
        expected = step if kind in _OF_A_STEP else 0
        if frame.step != expected or (micro_batch is not None and frame.micro_batch != micro_batch):
            raise LaneError(
                f"the server sent {frame.kind.name} of step {frame.step}, micro-batch "
                f"{frame.micro_batch}, in step {expected}"
            )
        return frame


def of_shape(frame: Frame, name: str, shape: torch.Size) -> torch.Tensor:
    """Return a tensor of a frame.

    Raises:
        LaneError: It has another shape.

    """
    tensor = frame.tensors[name]  # the lane has checked that it exists
    if tensor.shape != shape:
        raise LaneError(
            f"the server answered {tuple(shape)} hidden states with {tuple(tensor.shape)}"
        )
    return tensor


def number(fields: Mapping[str, Value], name: str, most: float = math.inf) -> float:
    """Return a number from 0 to ``most`` of a frame that ends a step.

    Raises:
        LaneError: It is none.

    """
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise LaneError(f"the server ended a step with {name} = {value!r}")
    return float(value)


def check_average(name: str, found: torch.Tensor | None, own: torch.Tensor) -> None:
    """Check a tensor of the server's average.

    Raises:
        LaneError: It can't replace the client's own.

    """
    if found is None or found.dtype is not torch.float32 or found.shape != own.shape:
        raise LaneError(f"the server's average has no {name} of float32 {tuple(own.shape)}")
