"""A stream of a lane: its records are encrypted with a separate key in each direction."""

import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

from split.protocol.errors import FrameError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.keys import LaneSecrets
from split.protocol.payload import Outgoing
from split.protocol.records import Opener, Sealer

_HTTP2_FRAME_BYTES = 2**14


@dataclass(frozen=True)
class Traffic:
    """Traffic and processing time of a stream, or of all streams of a lane, at this end.

    The bytes include the handshake and all overhead above TCP except the initial headers and the
    trailers of gRPC.
    """

    bytes_up: int = 0  # number of bytes from the client to the server
    bytes_down: int = 0  # number of bytes from the server to the client
    seconds_crypto: float = 0.0  # time spent on encryption and decryption
    seconds_serialisation: float = 0.0  # time spent on serialising and deserialising tensors
    seconds_waiting: float = 0.0  # time spent in ``Lane.receive``

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Stream:
    """Encryption and decryption of a stream's records, for one writing and one reading thread.

    ``carried`` contains the numbers of bytes that this end sent and received in the handshake.
    ``release`` ends the stream immediately, even if data is in transit.
    """

    def __init__(
        self,
        secrets: LaneSecrets,
        limits: Limits,
        is_client: bool,
        carried: tuple[int, int],
        release: Callable[[], object],
    ) -> None:
        self.resumption = secrets.resumption  # ticket that opens the lane's next stream
        self.release = release
        self._limits = limits
        self._is_client = is_client
        self._sealer = Sealer(secrets.up if is_client else secrets.down)
        self.opener = Opener(secrets.down if is_client else secrets.up, limits)
        self._sent, self._received = carried
        self._seconds_packing = 0.0

    @property
    def used_bytes(self) -> int:
        """The larger of the numbers of bytes sent and received so far."""
        return max(self._sent, self._received)

    @property
    def traffic(self) -> Traffic:
        """The traffic of the stream so far."""
        return Traffic(
            bytes_up=self._sent if self._is_client else self._received,
            bytes_down=self._received if self._is_client else self._sent,
            seconds_crypto=self._sealer.seconds + self.opener.seconds_crypto,
            seconds_serialisation=self._seconds_packing + self.opener.seconds_serialisation,
        )

    def seal(self, outgoing: Outgoing, acknowledged: int) -> Iterator[bytes]:
        """Yield a frame's records; ``acknowledged`` is the number of frames that have arrived.

        Raise ``FrameError`` if a tensor contains a value that is not finite. Raise ``LaneCutError``
        if the key has reached its limit of encrypted bytes.
        """
        started = time.perf_counter()
        content = outgoing.write()
        self._seconds_packing += time.perf_counter() - started
        for record in self._sealer.seal(outgoing.frame, acknowledged, content):
            self._sent += wire_bytes(record)
            yield record

    def confirm(self, received: int) -> bytes:
        """Return this end's first record, which acknowledges the first ``received`` frames."""
        (record,) = self.seal(Outgoing(Frame(Kind.CONFIRM), self._limits), received)
        return record

    def open(self, record: bytes) -> Frame | None:
        """Decrypt a record; return the frame if the record completes it, otherwise None.

        Raise a FrameError if the record or the frame is not allowed on the lane.
        """
        self._received += wire_bytes(record)
        return self.opener.open(record)

    def open_confirmation(self, record: bytes) -> None:
        """Decrypt the other end's first record, which acknowledges the frames that arrived there.

        Raise a FrameError if the record is not a valid ``CONFIRM`` frame.
        """
        frame = self.open(record)
        if frame is None or frame.kind is not Kind.CONFIRM:
            raise FrameError("a stream began without CONFIRM")


def wire_bytes(message: bytes) -> int:
    """Return the number of bytes of a gRPC message above TCP, including frame headers."""
    size = len(message) + 5
    return size + 9 * -(-size // _HTTP2_FRAME_BYTES)
