"""When and why a lane ends, and time limits for its streams."""

import copy
import math
import threading
import time

from split.lane.stream import Stream
from split.lane.transport import CLOSE_SECONDS
from split.protocol.errors import LaneCutError, LaneError


class Lifetime:
    """Whether and why a lane has ended. Protected by the lock of the lane."""

    def __init__(self, resume_timeout: float) -> None:
        self.error: LaneError | None = None  # error that ended the lane; None while it is open
        self.close_reason: str | None = None  # error message for the other end; None for CLOSE
        self.ended_at = math.inf  # time at which the lane ended, on ``time.monotonic``'s clock
        self._resume_timeout = resume_timeout  # seconds within which to replace a cut stream
        self._cut: LaneError = LaneCutError("no stream has been opened yet")
        # Time by which a cut stream must be replaced, on ``time.monotonic``'s clock.
        self.resume_by = time.monotonic() + resume_timeout
        self._closing: threading.Timer | None = None

    def cut(self, error: LaneError) -> None:
        """Record that the current stream was cut."""
        self._cut = copy.copy(error)
        self.resume_by = time.monotonic() + self._resume_timeout

    def not_resumed(self) -> LaneError | None:
        """Return an error if a cut stream was not replaced in time, otherwise None."""
        if time.monotonic() < self.resume_by:
            return None
        return LaneCutError(
            f"{self._cut}; the lane was not resumed within {self._resume_timeout:g} s "
            "(split.resume-timeout)"
        )

    def end(self, error: LaneError, close_reason: str | None) -> None:
        """Record the end of the lane."""
        # Copy the error, because its traceback references a stream, its keys and a record.
        self.error, self.close_reason = copy.copy(error), close_reason
        self.ended_at = time.monotonic()

    def release_later(self, stream: Stream) -> None:
        """Limit the time for sending the last frames over a stream."""
        self._closing = threading.Timer(CLOSE_SECONDS, stream.release)
        self._closing.daemon = True
        self._closing.start()

    def finish(self) -> None:
        """Cancel the time limit after the last frames have been sent."""
        if self._closing is not None:
            self._closing.cancel()
