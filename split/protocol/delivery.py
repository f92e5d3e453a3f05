"""Frames of a lane that were sent, that have arrived, and that must be sent again after a cut.

Both ends number the frames that they send, from 0, without putting the number on the wire: a stream
delivers in order, and each record's header acknowledges how many frames its sender has received.
A frame is kept until it has been acknowledged. A new stream begins with a ``CONFIRM`` frame in each
direction, whose acknowledgement says from which frame to continue. So every frame arrives exactly
once and in order, however often the network cuts the stream.
"""

from collections import deque

from split.protocol.errors import FrameError
from split.protocol.payload import Outgoing


class Delivery:
    """The frames of one end of a lane. Callers serialise access with a lock of their own.

    Attributes:
        received: Frames that have arrived, over all streams.
        acknowledged: Frames that the other end is known to have.
        kept_bytes: Memory of the frames that have not been acknowledged, sent or not.
        unsent_bytes: Memory of the frames that have not been sent over the current stream.

    """

    def __init__(self) -> None:
        self.received = 0
        self.acknowledged = 0
        self.kept_bytes = 0
        self.unsent_bytes = 0
        self._kept: deque[Outgoing] = deque()  # from number ``acknowledged`` on
        self._sent = 0  # how many of those kept went over the current stream

    def add(self, frame: Outgoing) -> None:
        """Queue a frame behind all others."""
        self._kept.append(frame)
        self.kept_bytes += frame.kept_bytes
        self.unsent_bytes += frame.kept_bytes

    def next(self) -> Outgoing | None:
        """Return the frame to send now, or None if all have been sent."""
        if self._sent == len(self._kept):
            return None
        frame = self._kept[self._sent]
        self._sent += 1
        self.unsent_bytes -= frame.kept_bytes
        return frame

    def acknowledge(self, count: int) -> None:
        """Drop the frames that the other end has.

        Args:
            count: How many frames the other end has received, over all streams.

        Raises:
            FrameError: It is fewer than before, or more than were sent.

        """
        if not self.acknowledged <= count <= self.acknowledged + self._sent:
            raise FrameError(
                f"the other side acknowledges {count} frames; it had {self.acknowledged}, and "
                f"{self._sent} more were sent"
            )
        while self.acknowledged < count:
            self.kept_bytes -= self._kept.popleft().kept_bytes
            self._sent -= 1
            self.acknowledged += 1

    def restart(self, count: int) -> None:
        """Begin a new stream, at whose other end ``count`` frames have arrived.

        Raises:
            FrameError: As for ``acknowledge``.

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
        """Drop all frames; nothing will be sent any more."""
        self._kept.clear()
        self._sent = self.kept_bytes = self.unsent_bytes = 0
