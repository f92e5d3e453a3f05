"""A client's lane to the block server, which can be taken up again when the network cuts it."""

import time
from collections.abc import Callable, Mapping

import torch

from split.lane.lane import Lane
from split.lane.lasting import LastingLane
from split.lane.traffic import Traffic
from split.protocol.errors import LaneCutError, LaneError, LaneTimeoutError
from split.protocol.frames import Frame, Kind, Value


class ClientLane:
    """Sends frames, and waits for those that are due, over one lane after another.

    Args:
        lane: the first one.
        frame_timeout: seconds to wait for the server's next frame.
        reconnect: opens another lane when one is cut; None lets it end.

    Attributes:
        seconds_waiting: for the server's frames.

    """

    def __init__(
        self, lane: Lane, frame_timeout: float, reconnect: Callable[[Lane], Lane] | None
    ) -> None:
        self.seconds_waiting = 0.0
        self._lane: Lane | LastingLane = lane
        self._frame_timeout = frame_timeout
        self._reconnect = reconnect

    @property
    def present(self) -> Lane:
        """The lane that frames go over."""
        return self._lane.present if isinstance(self._lane, LastingLane) else self._lane

    @property
    def opened(self) -> int:
        """How many lanes there have been."""
        return self._lane.opened if isinstance(self._lane, LastingLane) else 1

    @property
    def traffic(self) -> Traffic:
        """The account of all lanes."""
        return self._lane.traffic

    def outlast_cuts(self) -> None:
        """Take the lane up again from now on when it is cut; the server must know of it."""
        self._lane = LastingLane(self.present)

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, torch.Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Queue a frame; see ``Lane.send``."""
        self._lane.send(kind, step, micro_batch, tensors, fields)

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
        try:
            frame = self._receive(until)
        finally:
            self.seconds_waiting += time.monotonic() - started
        if frame.kind not in (kind, also):
            raise LaneError(f"the server sent a frame {frame.kind.name} where {kind.name} is due")
        return frame

    def close(self) -> None:
        """End the lane in order, and any that follows."""
        self._lane.close()

    def _receive(self, until: float | None) -> Frame:
        while True:
            limit = self._frame_timeout
            timeout = limit if until is None else max(0.0, until - time.monotonic())
            try:
                return self._lane.receive(timeout)
            except LaneTimeoutError:
                knob = "split.frame-timeout" if until is None else "round-timeout"
                raise LaneTimeoutError(
                    f"the block server sent nothing for {timeout:.0f} s ({knob})"
                ) from None
            except LaneCutError as error:
                if self._reconnect is None or not isinstance(self._lane, LastingLane):
                    raise
                self._go_on(self._lane, self._reconnect, error)

    def _go_on(
        self, lasting: LastingLane, reconnect: Callable[[Lane], Lane], cut: LaneCutError
    ) -> None:
        """Open another lane, and go on over it with what did not arrive."""
        while True:
            try:
                lane = reconnect(lasting.present)
            except LaneError as error:
                raise LaneCutError(f"{cut}, and could not be taken up again: {error}") from error
            try:
                return lasting.ask(lane, self._frame_timeout)
            except LaneTimeoutError:
                raise LaneTimeoutError(
                    "the block server did not go on over a lane that was taken up again within "
                    f"{self._frame_timeout:g} s (split.frame-timeout)"
                ) from None
            except LaneCutError:
                continue
