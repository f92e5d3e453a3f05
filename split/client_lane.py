"""A client's lane to the block server, which can be taken up again when the network cuts it."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch

from split.frames import Frame, Kind, Value
from split.lane import Lane
from split.lane_errors import LaneCutError, LaneError, LaneTimeoutError


class ClientLane:
    """Sends frames, and waits for those that are due, over one lane after another.

    Args:
        lane: the first one.
        frame_timeout: seconds to wait for the server's next frame.
        reconnect: opens another lane when one is cut; None lets it end.

    Attributes:
        lanes: all there have been; the last one is the present one.
        seconds_waiting: for the server's frames.

    """

    def __init__(
        self, lane: Lane, frame_timeout: float, reconnect: Callable[[Lane], Lane] | None
    ) -> None:
        self.lanes = [lane]
        self.seconds_waiting = 0.0
        self._frame_timeout = frame_timeout
        self._reconnect = reconnect

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, torch.Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Queue a frame; see ``Lane.send``."""
        self.lanes[-1].send(kind, step, micro_batch, tensors, fields)

    def receive(self, kind: Kind, until: float | None = None, also: Kind | None = None) -> Frame:
        """Wait for a frame of a kind.

        Args:
            kind: what is due.
            until: when to stop waiting, on ``time.monotonic``'s clock; None is ``frame_timeout``.
            also: another kind that may come.

        Raises:
            LaneError: the lane has ended, no frame came in time, or one that is not due.

        """
        started = time.monotonic()
        timeout = self._frame_timeout if until is None else max(0.0, until - started)
        try:
            frame = self.lanes[-1].receive(timeout)
        except LaneTimeoutError:
            knob = "split.frame-timeout" if until is None else "round-timeout"
            raise LaneTimeoutError(
                f"the block server sent nothing for {timeout:.0f} s ({knob})"
            ) from None
        finally:
            self.seconds_waiting += time.monotonic() - started
        if frame.kind not in (kind, also):
            raise LaneError(f"the server sent a frame {frame.kind.name} where {kind.name} is due")
        return frame

    def resume(self, error: LaneCutError, step: int, until: float) -> Mapping[str, Value]:
        """Open another lane, and go on from the last step that was finished.

        Args:
            error: with which the present lane ended.
            step: how many steps of the round this client has finished.
            until: when to stop waiting for the server, on ``time.monotonic``'s clock.

        Returns:
            The server's ``step``, and its answer to the one before.

        Raises:
            LaneError: the lane that was cut can't be taken up again.

        """
        if self._reconnect is None:
            raise error
        while True:
            self.lanes.append(self._reconnect(self.lanes[-1]))
            with suppress(LaneCutError):  # cut again
                self.send(Kind.JOIN, fields={"resume": step})
                return self.receive(Kind.WELCOME, until).fields

    def close(self) -> None:
        """End the present lane in order; those before were cut."""
        self.lanes[-1].close()
