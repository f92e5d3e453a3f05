"""A lane: frames in order, each exactly once, over one stream after another.

This is the only layer that knows of cuts. When the network cuts a stream, the client opens the next
one and both ends send again what the other has not acknowledged; ``send`` and ``receive`` don't
notice. A record that the other end has not encrypted is a cut, too: who alters one achieves no more
than who cuts the stream. A lane ends when either side closes it, when its time is over, when the
other end has sent what it doesn't allow, when a cut stream is not replaced in time, or when it was
cut too often.
"""

import copy
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from torch import Tensor

from split.lane.inbox import Inbox
from split.lane.lifetime import Lifetime
from split.lane.stream import Stream, lane_error
from split.lane.traffic import Traffic
from split.lane.transport import CLOSE_SECONDS
from split.protocol.delivery import Delivery
from split.protocol.errors import (
    AlteredRecordError,
    FrameError,
    LaneBacklogError,
    LaneClosedError,
    LaneCutError,
    LaneError,
    LaneTimeoutError,
    PeerError,
    printable,
)
from split.protocol.frames import Frame, Kind, Limits, Value
from split.protocol.payload import Outgoing
from split.protocol.tickets import Identity

_LOG = logging.getLogger(__name__)
_MAX_STREAMS = 1000  # each costs a handshake


class Lane:
    """One end of a lane. Its methods may be called from any thread.

    Args:
        identity: Run, round and client.
        limits: Limits of what the other end may send, and of what this end queues for it.
        is_client: Whether this is the client's end.
        resume_timeout: Seconds after which a stream that was cut must have been replaced.

    Attributes:
        identity: Run, round and client; both ends have verified it.
        limits: Limits of what the other end may send.
        opened: Streams opened so far.
        over: Set when the lane has ended, and its last stream with it.

    """

    def __init__(
        self, identity: Identity, limits: Limits, is_client: bool, resume_timeout: float
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.opened = 0
        self.over = threading.Event()
        self._is_client = is_client
        lock = threading.RLock()  # guards everything below
        self._changed = threading.Condition(lock)  # a frame has arrived, or the lane has changed
        self._to_send = threading.Condition(lock)  # a frame is to be sent
        self._room = threading.Condition(lock)  # a frame was sent, or was received by the user
        self._delivery = Delivery()
        self._inbox = Inbox(limits.hidden_bytes)
        self._life = Lifetime(resume_timeout)
        self._stream: Stream | None = None
        self._before = Traffic()  # traffic of the streams that were replaced
        self._seconds_waiting = 0.0

    def __repr__(self) -> str:
        return f"Lane({self.identity})"

    @property
    def ended(self) -> bool:
        """Whether either side has ended the lane, or it broke for good."""
        with self._changed:
            self._expire()
            return self._life.error is not None

    @property
    def ended_at(self) -> float:
        """Time at which the lane ended, on ``time.monotonic``'s clock; infinity before."""
        return self._life.ended_at

    @property
    def traffic(self) -> Traffic:
        """The account of all streams."""
        with self._changed:
            present = self._stream.traffic if self._stream is not None else Traffic()
            return self._before + present + Traffic(seconds_waiting=self._seconds_waiting)

    def check(self) -> None:
        """Raise the error that the lane has ended with, if it has."""
        with self._changed:
            self._check()

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Queue a frame; another thread converts, encrypts and sends it.

        A client waits while more than ``limits.queue_bytes`` are unsent. A server never waits: what
        a client has not acknowledged is kept for it up to the same size, and beyond it the lane
        ends.

        Args:
            kind: Kind of the frame.
            step: Optimizer step.
            micro_batch: Micro-batch within the step.
            tensors: Must not change until the other end has acknowledged the frame, as it does
                with the next frame that it sends.
            fields: Scalar metadata.

        Raises:
            FrameError: The frame is not one that the lane allows; the lane lives on.
            LaneBacklogError: The client doesn't read what it is sent; the lane has ended.
            LaneError: The lane has ended.

        """
        frame = Frame(
            kind=kind,
            step=step,
            micro_batch=micro_batch,
            tensors=dict(tensors or {}),
            fields=dict(fields or {}),
        )
        outgoing = Outgoing(frame, self.limits)
        with self._changed:
            if self._is_client:
                self._room.wait_for(self._may_queue)
            self._check()
            self._delivery.add(outgoing)
            kept = self._delivery.kept_bytes
            if not self._is_client and kept > self.limits.queue_bytes:
                self._end(
                    LaneBacklogError(
                        f"{self.identity.node} has left {kept} bytes unread; at most "
                        f"{self.limits.queue_bytes} are kept for it"
                    ),
                    "too much of what was sent has not been read",
                )
                self._check()
            self._to_send.notify()

    def receive(self, timeout: float) -> Frame:
        """Wait for the next frame.

        Args:
            timeout: Seconds.

        Raises:
            LaneTimeoutError: No frame came in time; the lane lives on.
            LaneClosedError: Either side closed the lane, and there are no more frames.
            PeerError: The other side gave up, and said why.
            LaneError: The lane has ended otherwise.

        """
        started = time.perf_counter()
        end = time.monotonic() + timeout
        with self._changed:
            while not self._inbox and self._life.error is None and time.monotonic() < end:
                until = end
                if self._stream is None:
                    until = min(end, self._life.resume_by)
                self._changed.wait(max(0.0, until - time.monotonic()))
                self._expire()
            self._seconds_waiting += time.perf_counter() - started
            if self._inbox:
                self._room.notify_all()
                return self._inbox.take()
            self._check()
        raise LaneTimeoutError(f"the other side sent nothing for {timeout:.1f} s")

    def close(self, error: str | None = None) -> None:
        """End the lane; calls after the first change nothing.

        Frames that have arrived and were not received are dropped. A client waits until the server
        has taken note, for a few seconds.

        Args:
            error: Why this side gives up: the other side is told at once, and frames that are still
                queued are dropped. Without it they are sent before the lane ends.

        """
        reason = f": {error}" if error is not None else ""
        with self._changed:
            self._inbox.clear()
            self._end(LaneClosedError(f"this end has closed the lane{reason}"), error, flush=True)
            connected = self._stream is not None
        if self._is_client and connected:
            self.over.wait(2 * CLOSE_SECONDS)

    def fail(self, error: LaneError) -> None:
        """End the lane for a reason that the other side can't be told."""
        with self._changed:
            self._end(error)

    def wait_ended(self, timeout: float) -> bool:
        """Wait until the lane has ended, for so many seconds; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._life.error is not None, timeout)

    # The following methods are for the modules that open streams.

    def detach(self, reason: str) -> int:
        """Take the current stream away, if there is one; return how many frames have arrived.

        Nothing is accepted from it any more, so that the count stays true until the next stream.
        """
        with self._changed:
            stream = self._stream
            self._lose_stream(LaneCutError(reason))
            received = self._delivery.received
        if stream is not None:
            stream.release()
        return received

    def attach(self, stream: Stream, acknowledged: int) -> None:
        """Continue over a stream that both ends have confirmed.

        Over the stream of a lane that has ended, the other side is only told why.

        Args:
            stream: The newest one.
            acknowledged: How many frames have arrived at the other end.

        """
        with self._changed:
            self._expire()
            self._stream = stream
            self.opened += 1
            try:
                if self._life.error is None:
                    self._delivery.restart(acknowledged)
            except FrameError as error:
                self._end(error, str(error))
            if self.opened > _MAX_STREAMS:
                message = f"the lane was cut {_MAX_STREAMS} times"
                self._end(LaneError(message), message)
            if self._life.error is not None:
                self._life.release_later(stream)
            self._wake()

    def messages(self, stream: Stream) -> Iterator[bytes]:
        """Yield the records to send over a stream, until it is replaced or the lane has ended."""
        try:
            while (outgoing := self._next(stream)) is not None:
                yield from stream.seal(outgoing, self._delivery.received)
        except Exception as error:
            # Only our own errors' messages: those of others might quote what they failed on.
            reason = str(error) if isinstance(error, LaneError) else type(error).__name__
            with self._changed:
                if isinstance(error, LaneCutError):
                    self._lose_stream(error)
                else:
                    failure = FrameError(f"a frame could not be sent: {reason}")
                    self._end(failure, "it failed to send")
        with self._changed:
            if self._stream is not stream:
                return
            message, received = self._life.close_reason, self._delivery.received
        last = Frame(Kind.CLOSE)
        if message is not None:
            last = Frame(Kind.ERROR, fields={"message": printable(message)})
        with suppress(LaneError):
            yield from stream.seal(Outgoing(last, self.limits), received)

    def read(self, stream: Stream, messages: Iterable[bytes]) -> None:
        """Take a stream's records until it is replaced or ends.

        After the lane's end, records are discarded: the stream stays open to send the last frames.
        """
        try:
            for message in messages:
                with self._changed:
                    present, ended = self._stream is stream, self._life.error is not None
                if not present:
                    return
                if not ended:
                    self._open(stream, message)
                if stream.exhausted and self._is_client:
                    raise LaneCutError("the stream's keys have encrypted as much as they may")
            where = "within a frame" if stream.mid_frame else "before it was closed"
            raise LaneCutError(f"the lane was cut {where}")
        except Exception as error:
            with self._changed:
                if self._stream is stream:
                    self._lose_stream(lane_error(error))
        finally:
            stream.drop()
            with self._changed:
                if self._life.error is not None and self._stream in (stream, None):
                    self._finish()

    def _open(self, stream: Stream, record: bytes) -> None:
        try:
            frame = stream.open(record)
        except AlteredRecordError:
            raise  # a cut
        except Exception as error:
            failure = lane_error(error)
            with self._changed:
                return self._end(failure, str(failure))
        with self._changed:
            if self._stream is stream and self._life.error is None:
                self._take(stream, frame)

    def _take(self, stream: Stream, frame: Frame | None) -> None:
        """Note what a record acknowledges, and put the frame that it completes into the inbox."""
        try:
            self._delivery.acknowledge(stream.acknowledged)
        except FrameError as error:
            return self._end(error, str(error))
        if frame is None:
            return None
        if frame.kind is Kind.CLOSE:
            return self._end(LaneClosedError("the other side has closed the lane"))
        if frame.kind is Kind.ERROR:
            message = printable(str(frame.fields.get("message")))
            return self._end(PeerError(f"the other side gave up: {message}"))
        if frame.kind is Kind.CONFIRM:
            return self._end(FrameError("a second CONFIRM came"), "a second CONFIRM came")
        size = max(stream.frame_bytes, frame.tensor_bytes) + frame.overhead_bytes
        self._room.wait_for(
            lambda: (
                self._inbox.has_room(size)
                or self._life.error is not None
                or self._stream is not stream
            )
        )
        if self._life.error is None and self._stream is stream:
            self._inbox.add(frame, size)
            self._delivery.received += 1
            self._changed.notify_all()
        return None

    def _next(self, stream: Stream) -> Outgoing | None:
        """Wait for the next frame to send over a stream; return None when there are no more."""
        found: list[Outgoing | None] = []

        def ready() -> bool:
            if self._stream is not stream:
                return True
            frame = self._delivery.next()
            if frame is not None:
                found.append(frame)
            return frame is not None or self._life.error is not None

        with self._changed:
            self._to_send.wait_for(ready)
            if self._is_client:
                self._room.notify_all()
            return found[0] if found else None

    def _may_queue(self) -> bool:
        fits = self._delivery.unsent_bytes <= self.limits.queue_bytes
        return fits or self._stream is None or self._life.error is not None

    def _check(self) -> None:
        self._expire()
        if self._life.error is not None:
            raise copy.copy(self._life.error)  # the original must not get a traceback, either

    def _expire(self) -> None:
        """End the lane if a stream that was cut has not been replaced in time."""
        if self._stream is None and self._life.error is None:
            error = self._life.not_resumed()
            if error is not None:
                self._end(error, "the lane was not resumed within split.resume-timeout")

    def _wake(self) -> None:
        for condition in (self._changed, self._to_send, self._room):
            condition.notify_all()

    def _lose_stream(self, cut: LaneError) -> None:
        if self._stream is not None:
            self._before += self._stream.traffic
            self._stream = None
            self._life.cut(cut)
            if self._life.error is None:
                _LOG.info("%r: %s", self, printable(str(cut)))
        self._wake()

    def _end(self, error: LaneError, message: str | None = None, flush: bool = False) -> None:
        """End the lane for a reason; only the first one counts.

        Args:
            error: Raised by ``send`` and ``receive`` from now on.
            message: Error for the other end; None if the lane ends in order.
            flush: Whether frames that are queued are to be sent before that.

        """
        if self._life.error is not None:
            return
        self._life.end(error, message)
        if not flush or message is not None:
            self._delivery.drop_unsent()
        if self._stream is None:
            self._finish()
        else:
            self._life.release_later(self._stream)
        self._wake()
        _LOG.info("%r ended: %s", self, printable(str(error)))

    def _finish(self) -> None:
        """Forget everything that is of no use after the end."""
        self._lose_stream(LaneCutError("the lane has ended"))
        self._delivery.clear()
        self._life.finish()
        self.over.set()
