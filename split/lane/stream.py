"""A stream of a lane, which encrypts records with its own key in each direction."""

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc

from split.lane.traffic import Traffic
from split.lane.transport import stream_error
from split.protocol.errors import FrameError, LaneError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.key_schedule import LaneSecrets
from split.protocol.payload import Outgoing
from split.protocol.records import MAX_BYTES, Opener, Sealer

# A client replaces a stream before its keys reach their limit, with a margin for one large frame.
_REPLACE_AFTER_BYTES = MAX_BYTES - 2**32
_HTTP2_FRAME_BYTES = 2**14


class Stream:
    """Encryption and decryption of a stream's records, for one writing and one reading thread.

    Args:
        secrets: Secrets from the handshake.
        limits: Limits on the frames of the other end.
        is_client: Whether this is the client's end.
        carried: Bytes of the handshake that this end sent and received.
        release: Function that ends the stream immediately, even if data is in transit.

    Attributes:
        resumption: Ticket with which the client may open the next stream of the lane.
        release: Function that ends the stream immediately.

    """

    def __init__(
        self,
        secrets: LaneSecrets,
        limits: Limits,
        is_client: bool,
        carried: tuple[int, int],
        release: Callable[[], object],
    ) -> None:
        self.resumption = secrets.resumption
        self.release = release
        self._limits = limits
        self._is_client = is_client
        self._sealer = Sealer(secrets.up if is_client else secrets.down)
        self._opener = Opener(secrets.down if is_client else secrets.up, limits)
        self._sent, self._received = carried
        self._seconds_packing = 0.0

    @property
    def acknowledged(self) -> int:
        """Number of frames that the other end has received, from its last record."""
        return self._opener.acknowledged

    @property
    def frame_bytes(self) -> int:
        """Payload size of the last record's frame in bytes."""
        return self._opener.frame_bytes

    @property
    def mid_frame(self) -> bool:
        """Whether the last frame is incomplete."""
        return self._opener.mid_frame

    @property
    def exhausted(self) -> bool:
        """Whether one of the keys is close to its limit of encrypted bytes."""
        return max(self._sent, self._received) >= _REPLACE_AFTER_BYTES

    @property
    def traffic(self) -> Traffic:
        """The traffic of the stream so far."""
        up, down = self._sent, self._received
        if not self._is_client:
            up, down = down, up
        return Traffic(
            bytes_up=up,
            bytes_down=down,
            seconds_crypto=self._sealer.seconds + self._opener.seconds_crypto,
            seconds_serialisation=self._seconds_packing + self._opener.seconds_serialisation,
        )

    def seal(self, outgoing: Outgoing, acknowledged: int) -> Iterator[bytes]:
        """Yield a frame's records.

        Args:
            outgoing: The frame.
            acknowledged: Number of frames that this end has received over the whole lane.

        Raises:
            FrameError: A tensor has a number that is not finite.
            LaneCutError: The key has reached its limit of encrypted bytes.

        """
        started = time.perf_counter()
        content = outgoing.write()
        self._seconds_packing += time.perf_counter() - started
        frame = outgoing.frame
        for record in self._sealer.seal(
            kind=frame.kind,
            step=frame.step,
            micro_batch=frame.micro_batch,
            acknowledged=acknowledged,
            content=content,
        ):
            self._sent += wire_bytes(record)
            yield record

    def confirm(self, received: int) -> bytes:
        """Return the first record of this end, with the number of frames that it has received."""
        (record,) = self.seal(Outgoing(Frame(Kind.CONFIRM), self._limits), received)
        return record

    def open(self, record: bytes) -> Frame | None:
        """Decrypt a record; return the frame if the record completes it, otherwise None.

        Raises:
            FrameError: The record or the frame is not allowed on the lane.

        """
        self._received += wire_bytes(record)
        return self._opener.open(record)

    def confirmation(self, record: bytes) -> int:
        """Decrypt the first record of the other end; return the number of frames it has received.

        Raises:
            FrameError: The record is not ``CONFIRM``.

        """
        frame = self.open(record)
        if frame is None or frame.kind is not Kind.CONFIRM:
            raise FrameError("a stream began without CONFIRM")
        return self.acknowledged

    def drop(self) -> None:
        """Discard an incomplete frame, because no more records will arrive."""
        self._opener.drop()


def lane_error(error: Exception) -> LaneError:
    """Return the lane's error for an exception of a stream."""
    if isinstance(error, LaneError):
        return error
    if isinstance(error, grpc.RpcError):
        return stream_error(error)
    # Omit the message, because it may contain confidential data.
    return FrameError(type(error).__name__)


def wire_bytes(message: bytes) -> int:
    """Return the bytes of a gRPC message above TCP, including all frame headers."""
    size = len(message) + 5
    return size + 9 * -(-size // _HTTP2_FRAME_BYTES)


class Outbox:
    """The messages of a client's stream, from a queue of iterators.

    gRPC requests the next message in a separate thread, which waits for the next iterator.
    """

    def __init__(self, *parts: Iterator[bytes]) -> None:
        self._parts: SimpleQueue[Iterator[bytes] | None] = SimpleQueue()
        self._present: Iterator[bytes] | None = iter(())
        for part in parts:
            self.put(part)

    def put(self, part: Iterator[bytes] | None) -> None:
        """Queue an iterator; None ends the stream."""
        self._parts.put(part)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        while self._present is not None:
            message = next(self._present, None)
            if message is not None:
                return message
            self._present = self._parts.get()
        raise StopIteration
