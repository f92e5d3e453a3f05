"""The end of a lane: its reason, its time, and the limit for streams that were cut."""

import copy
import math
import threading
import time

from split.lane.stream import Stream
from split.lane.transport import CLOSE_SECONDS
from split.protocol.errors import LaneCutError, LaneError


class Lifetime:
    """Whether a lane lives, and why it has ended; the lane's lock guards it.

    Args:
        resume_timeout: Seconds after which a stream that was cut must have been replaced.

    Attributes:
        error: Error with which the lane has ended; None while it lives.
        close_reason: Error for the other end; None if the lane ends in order.
        ended_at: When it has ended, on ``time.monotonic``'s clock.

    """

    def __init__(self, resume_timeout: float) -> None:
        self.error: LaneError | None = None
        self.close_reason: str | None = None
        self.ended_at = math.inf
        self._resume_timeout = resume_timeout
        self._cut: LaneError = LaneCutError("no stream has been opened yet")
        self._cut_at = time.monotonic()
        self._closing: threading.Timer | None = None

    @property
    def resume_by(self) -> float:
        """When a stream that was cut must have been replaced, on ``time.monotonic``'s clock."""
        return self._cut_at + self._resume_timeout

    def cut(self, error: LaneError) -> None:
        """Record that the current stream was cut."""
        self._cut, self._cut_at = copy.copy(error), time.monotonic()

    def not_resumed(self) -> LaneError | None:
        """Return the error of a lane whose cut stream has not been replaced in time."""
        if time.monotonic() < self.resume_by:
            return None
        return LaneCutError(
            f"{self._cut}, and was not resumed within {self._resume_timeout:g} s "
            "(split.resume-timeout)"
        )

    def end(self, error: LaneError, close_reason: str | None) -> None:
        """Record the end."""
        # A copy: the traceback of the original holds a stream, its keys and a record.
        self.error, self.close_reason = copy.copy(error), close_reason
        self.ended_at = time.monotonic()

    def release_later(self, stream: Stream) -> None:
        """Limit the time in which the last frames are sent over a stream."""
        self._closing = threading.Timer(CLOSE_SECONDS, stream.release)
        self._closing.daemon = True
        self._closing.start()

    def finish(self) -> None:
        """Stop limiting the time of the last frames; they have been sent."""
        if self._closing is not None:
            self._closing.cancel()
