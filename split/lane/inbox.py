"""Queue of the frames that have arrived over a lane and wait for ``Lane.receive``."""

from collections import deque

from split.protocol.frames import Frame

_FRAMES_AHEAD = 16  # maximum number of frames, whatever their size


class Inbox:
    """A queue of frames with limited memory, protected by the lock of the lane.

    The frames have at most ``max_bytes`` in total, but a single frame in the queue may be larger.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[tuple[Frame, int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def has_room(self, size: int) -> bool:
        """Return whether a frame of ``size`` bytes may be added."""
        fits = len(self._frames) < _FRAMES_AHEAD and self._bytes + size <= self._max_bytes
        return not self._frames or fits

    def add(self, frame: Frame, size: int) -> None:
        """Add a frame of ``size`` bytes."""
        self._frames.append((frame, size))
        self._bytes += size

    def take(self) -> Frame:
        """Remove and return the oldest frame."""
        frame, size = self._frames.popleft()
        self._bytes -= size
        return frame

    def clear(self) -> None:
        """Drop all frames."""
        self._frames.clear()
        self._bytes = 0
