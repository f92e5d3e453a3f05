"""Reliable delivery of a lane's frames, with retransmission after the network cuts a stream.

Each end numbers its outgoing frames from 0. The numbers are not sent: a stream delivers frames in
order, and each record's header contains the number of frames that its sender has received. A
frame is stored until it is acknowledged. A new stream begins with a ``CONFIRM`` frame in each
direction. Its header shows which frames have arrived, and the sender repeats the others. Therefore,
every frame arrives exactly once and in order, even if the stream is cut repeatedly.
"""

from collections import deque

from split.protocol.errors import FrameError
from split.protocol.payload import Outgoing


class Delivery:
    """The frames of one end of a lane. Not thread-safe; callers must hold a lock."""

    def __init__(self) -> None:
        self.received = 0  # number of frames that have arrived over all streams
        self.acknowledged = 0  # number of frames that the other end has acknowledged
        self.kept_bytes = 0  # memory of all frames that are not acknowledged, unsent ones included
        self.unsent_bytes = 0  # memory of the frames not yet sent over the current stream
        self._kept: deque[Outgoing] = deque()  # frames from number ``acknowledged`` on
        self._sent = 0  # number of stored frames that were sent over the current stream

    def add(self, frame: Outgoing) -> None:
        """Append a frame to the queue."""
        self._kept.append(frame)
        self.kept_bytes += frame.kept_bytes
        self.unsent_bytes += frame.kept_bytes

    def next(self) -> Outgoing | None:
        """Return the next frame to send, or None if all frames have been sent."""
        if self._sent == len(self._kept):
            return None
        frame = self._kept[self._sent]
        self._sent += 1
        self.unsent_bytes -= frame.kept_bytes
        return frame

    def acknowledge(self, count: int) -> None:
        """Drop the first ``count`` frames of the lane, which the other end has received.

        Raise a FrameError if the count is lower than before, or higher than the number of sent
        frames.
        """
        if not self.acknowledged <= count <= self.acknowledged + self._sent:
            raise FrameError(
                f"the other side acknowledges {count} frames; it had acknowledged "
                f"{self.acknowledged}, and {self._sent} more were sent"
            )
        while self.acknowledged < count:
            self.kept_bytes -= self._kept.popleft().kept_bytes
            self._sent -= 1
            self.acknowledged += 1

    def restart(self, count: int) -> None:
        """Begin a new stream after the other end has received ``count`` frames.

        Raise the errors of ``acknowledge``.
        """
        self.acknowledge(count)
        self._sent = 0
        self.unsent_bytes = self.kept_bytes

    def drop_unsent(self) -> None:
        """Drop the frames that have not been sent over the current stream."""
        while len(self._kept) > self._sent:
            self.kept_bytes -= self._kept.pop().kept_bytes
        self.unsent_bytes = 0

    def clear(self) -> None:
        """Drop all frames."""
        self._kept.clear()
        self._sent = self.kept_bytes = self.unsent_bytes = 0
