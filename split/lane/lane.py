"""One end of a lane: frames in order over an encrypted stream, the same at client and server.

Each end has two threads beside its user's. The writer is the one in which gRPC asks for the next
message: it packs, encrypts and sends what ``send`` queued. The reader decrypts and unpacks what
comes, up to a few frames ahead of ``receive``; then the other side has to wait.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from split.lane.traffic import Traffic
from split.lane.transport import CLOSE_SECONDS, stream_error, wire_bytes
from split.protocol.errors import (
    FrameError,
    LaneClosedError,
    LaneCutError,
    LaneError,
    LaneTimeoutError,
    PeerError,
)
from split.protocol.frames import Frame, Kind, Limits, Value
from split.protocol.key_schedule import LaneSecrets
from split.protocol.payload import Outgoing
from split.protocol.records import Opener, Sealer
from split.protocol.tickets import Identity, Ticket

_LOG = logging.getLogger(__name__)
_FRAMES_AHEAD = 16
_LONGEST_ERROR = 1000


class Lane:
    """One end of a lane. Its methods may be called from any thread.

    Args:
        identity: what the lane is for.
        secrets: of the handshake.
        limits: what may come over it.
        is_client: at which end this is.
        carried: bytes of the handshake that this end sent, and that it received.
        release: gives the stream up at once, whatever is still under way.

    Attributes:
        identity: run, round and node; both ends are sure of it.
        resumption: a ticket both ends have, for connecting again once the server has registered
            it in its book.
        limits: what may come over it.

    """

    def __init__(
        self,
        identity: Identity,
        secrets: LaneSecrets,
        limits: Limits,
        is_client: bool,
        carried: tuple[int, int],
        release: Callable[[], None],
    ) -> None:
        self.identity = identity
        self.resumption: Ticket = secrets.resumption
        self.limits = limits
        self._is_client = is_client
        self._release = release
        self._sealer = Sealer(secrets.up if is_client else secrets.down)
        self._opener = Opener(secrets.down if is_client else secrets.up, limits)
        self._sent, self._received = carried
        self._seconds_packing = self._seconds_waiting = 0.0
        self._changed = threading.Condition()  # goes with the next four
        self._outgoing: deque[Outgoing] = deque()
        self._incoming: deque[Frame] = deque()
        self._error: LaneError | None = None
        self._last_words: str | None = None
        self._limit = threading.Timer(CLOSE_SECONDS, release)
        self._limit.daemon = True
        self._reader: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"Lane({self.identity})"

    @property
    def ended(self) -> bool:
        """Whether either side has ended the lane, or it broke."""
        return self._error is not None

    @property
    def traffic(self) -> Traffic:
        """The account so far."""
        up, down = self._sent, self._received
        if not self._is_client:
            up, down = down, up
        return Traffic(
            bytes_up=up,
            bytes_down=down,
            seconds_crypto=self._sealer.seconds + self._opener.seconds_crypto,
            seconds_serialisation=self._seconds_packing + self._opener.seconds_serialisation,
            seconds_waiting=self._seconds_waiting,
        )

    def check(self) -> None:
        """Raise the error that the lane has ended with, if it has."""
        if self._error is not None:
            raise self._error.with_traceback(None)

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Queue a frame; it is packed, encrypted and sent in another thread, in order.

        Args:
            kind: what it is.
            step: optimizer step.
            micro_batch: micro-batch within the step.
            tensors: must not change until they have been sent.
            fields: small facts beside them.

        Raises:
            FrameError: the frame is not one that the lane allows; the lane lives on.
            LaneError: the lane has ended.

        """
        frame = Frame(kind, step, micro_batch, dict(tensors or {}), dict(fields or {}))
        outgoing = Outgoing(frame, self.limits)
        with self._changed:
            self.check()
            self._outgoing.append(outgoing)
            self._changed.notify_all()

    def receive(self, timeout: float) -> Frame:
        """Wait for the next frame.

        Args:
            timeout: seconds.

        Raises:
            LaneTimeoutError: no frame came in time; the lane lives on.
            LaneClosedError: either side closed the lane, and there are no more frames.
            PeerError: the other side gave up, and said why.
            LaneError: the lane has ended otherwise.

        """
        started = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._incoming or self._error, timeout)
            self._seconds_waiting += time.perf_counter() - started
            if self._incoming:
                self._changed.notify_all()
                return self._incoming.popleft()
            self.check()
        raise LaneTimeoutError(f"the other side sent nothing for {timeout:.1f} s")

    def close(self, error: str | None = None) -> None:
        """End the lane; calls after the first change nothing.

        Frames that have come and were not received are dropped. At the server this does not wait.

        Args:
            error: why this side gives up: the other side is told at once, and frames that are
                still queued are dropped. Without it they are sent before the lane ends.

        """
        reason = f": {error}" if error is not None else ""
        self._end(LaneClosedError(f"this end has closed the lane{reason}"), error, here=True)
        if self._is_client and self._reader not in (None, threading.current_thread()):
            self._reader.join(2 * CLOSE_SECONDS)

    def cut(self, reason: str) -> None:
        """End the lane as the network does when it breaks; for who knows that it has broken.

        Frames that have come and were not received are dropped, even if it has ended before.
        """
        self._end(LaneCutError(f"the lane was cut: {reason}"))
        with self._changed:
            self._incoming.clear()

    def start(self, messages: Iterable[bytes]) -> None:
        """Begin to take messages; for the modules that open lanes."""
        self._reader = threading.Thread(
            target=self._read, args=(messages,), name=f"lane {self.identity.node}", daemon=True
        )
        self._reader.start()

    def messages(self) -> Iterator[bytes]:
        """Give what is to be sent, until the lane ends; for the modules that open lanes."""
        try:
            while (outgoing := self._next()) is not None:
                yield from self._seal(outgoing)
        except Exception as error:
            # Only our own errors' words: those of others might quote what they failed on.
            reason = str(error) if isinstance(error, LaneError) else type(error).__name__
            self._end(FrameError(f"a frame could not be sent: {reason}"), "it failed to send")
        if isinstance(self._error, LaneCutError):
            return  # if the other side is still there, it may follow with another lane
        words = self._last_words
        last = Frame(Kind.CLOSE)
        if words is not None:
            last = Frame(Kind.ERROR, fields={"message": words[:_LONGEST_ERROR]})
        try:
            yield from self._seal(Outgoing(last, self.limits))
        except LaneError:
            _LOG.debug("%r ended without a last word", self)

    def over(self) -> None:
        """Note that there is no stream any more; for the modules that open lanes."""
        self._limit.cancel()

    def _next(self) -> Outgoing | None:
        """Wait for the next frame to send; None when there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._outgoing or self._error)
            return self._outgoing.popleft() if self._outgoing else None

    def _seal(self, outgoing: Outgoing) -> Iterator[bytes]:
        started = time.perf_counter()
        content = outgoing.write()
        self._seconds_packing += time.perf_counter() - started
        frame = outgoing.frame
        for record in self._sealer.seal(frame.kind, frame.step, frame.micro_batch, content):
            self._sent += wire_bytes(record)
            yield record

    def _read(self, messages: Iterable[bytes]) -> None:
        """Take messages until the stream ends, even those that nobody wants any more."""
        try:
            for message in messages:
                self._received += wire_bytes(message)
                if self._error is None:
                    self._take(message)
            where = "within a frame" if self._opener.mid_frame else "before it was closed"
            self._end(LaneCutError(f"the lane was cut {where}"))
        except Exception as error:
            self._end(stream_error(error, answered=self._opener.counter > 0))
        self._opener.drop()
        if self._is_client:
            self.over()
            self._release()

    def _take(self, message: bytes) -> None:
        try:
            frame = self._opener.open(message)
        except Exception as error:
            reason = str(error) if isinstance(error, LaneError) else type(error).__name__
            self._end(FrameError(reason), reason)
            return
        if frame is None:
            return
        if frame.kind is Kind.CLOSE:
            self._end(LaneClosedError("the other side has closed the lane"))
        elif frame.kind is Kind.ERROR:
            self._end(PeerError(f"the other side gave up: {frame.fields.get('message')}"))
        else:
            with self._changed:
                self._changed.wait_for(lambda: len(self._incoming) < _FRAMES_AHEAD or self._error)
                if self._error is None:
                    self._incoming.append(frame)
                    self._changed.notify_all()

    def _end(self, error: LaneError, words: str | None = None, here: bool = False) -> None:
        """End the lane for a reason; only the first one counts.

        Args:
            error: what ``send`` and ``receive`` raise from now on.
            words: the last ones to the other side; None if the lane ends in order.
            here: whether this end's user wants it so.

        """
        with self._changed:
            if here:
                self._incoming.clear()
            if self._error is not None:
                return
            self._error, self._last_words = error, words
            if not here or words is not None:
                self._outgoing.clear()
            self._limit.start()
            self._changed.notify_all()
        _LOG.info("%r ended: %s", self, error)
