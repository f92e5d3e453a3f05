"""A lane, which delivers frames in order and exactly once over a sequence of streams.

Only this layer handles cut streams. When the network cuts a stream, the client opens a new stream,
and both ends resend the unacknowledged frames. Callers of ``send`` and ``receive`` are not
affected. A record that fails authentication is handled like a cut, so altering a record achieves no
more than cutting the stream. A lane ends when either side closes it, when its deadline
passes, when the other end sends a frame that is not allowed, when a cut stream is not replaced in
time, or after too many cuts.
"""

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from torch import Tensor

from finetuning.errors import printable
from split.lane.stream import Stream, Traffic
from split.lane.transport import CLOSE_SECONDS, MAX_STREAMS, lane_error
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
)
from split.protocol.frames import Frame, Kind, Limits, Value
from split.protocol.payload import Outgoing
from split.protocol.records import MAX_BYTES_PER_KEY
from split.protocol.tickets import Identity

_LOG = logging.getLogger(__name__)
# A client replaces a stream before its keys reach their limit, with a margin for one large frame.
REPLACE_AFTER_BYTES = MAX_BYTES_PER_KEY - 2**32
_FRAMES_AHEAD = 16  # maximum number of frames that wait for ``receive``, whatever their size


class Lane:
    """One end of a lane. Its methods may be called from any thread.

    The lane ends if a cut stream is not replaced within ``resume_timeout`` seconds, or after
    ``max_streams`` streams. A client replaces a stream after ``replace_after_bytes`` bytes in one
    direction.
    """

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        is_client: bool,
        resume_timeout: float,
        max_streams: int = MAX_STREAMS,
        replace_after_bytes: int = REPLACE_AFTER_BYTES,
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.replace_after_bytes = replace_after_bytes
        self.opened = 0  # number of streams opened so far
        self.ended_at = math.inf  # time at which the lane ended, on ``time.monotonic``'s clock
        self.over = threading.Event()  # set when the lane and its last stream have ended
        self._is_client = is_client
        self._max_streams = max_streams
        self._changed = threading.Condition()  # guards all attributes below
        self._delivery = Delivery()
        self._inbox: deque[tuple[Frame, int]] = deque()  # frames for ``receive``, and their sizes
        self._error: LaneError | None = None  # error that ended the lane; None while it is open
        self._close_reason: str | None = None  # error message for the other end; None for CLOSE
        self._resume_timeout = resume_timeout
        self._cut: LaneError = LaneCutError("no stream has been opened yet")
        self._resume_by = time.monotonic() + resume_timeout  # time limit for replacing a cut stream
        self._closing: threading.Timer | None = None  # time limit for sending the last frames
        self.stream: Stream | None = None
        self._before = Traffic()  # traffic of the streams that were replaced
        self._seconds_waiting = 0.0

    def __repr__(self) -> str:
        return f"Lane({self.identity})"

    @property
    def traffic(self) -> Traffic:
        """The traffic of all streams so far."""
        with self._changed:
            present = self.stream.traffic if self.stream is not None else Traffic()
            return self._before + present + Traffic(seconds_waiting=self._seconds_waiting)

    def check(self) -> None:
        """Raise the lane's error if the lane has ended."""
        with self._changed:
            self._expire()
            if self._error is not None:
                raise copy.copy(self._error)  # a copy, because raising adds a traceback

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Queue a frame, which another thread serialises, encrypts and sends.

        At the client, wait while the unsent frames exceed ``limits.queue_bytes``, unless the stream
        is cut. The server never waits: if the frames that the client has not
        acknowledged exceed this size, the server ends the lane.

        The tensors must not change until the other end has acknowledged the frame. Each frame from
        the other end acknowledges all frames that have arrived there.

        Raise ``FrameError`` if the frame is not allowed on the lane, which stays open. Raise
        ``LaneBacklogError`` if the client does not read the server's frames; the lane has ended.
        Raise ``LaneError`` if the lane has ended.
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
                self._changed.wait_for(self._may_queue)
            self.check()
            self._delivery.add(outgoing)
            kept = self._delivery.kept_bytes
            if not self._is_client and kept > self.limits.queue_bytes:
                self._end(
                    LaneBacklogError(
                        f"{self.identity.node} has not acknowledged {kept} bytes of frames; at "
                        f"most {self.limits.queue_bytes} are stored for a client"
                    ),
                    "the client has left too many frames unacknowledged",
                )
                self.check()
            self._changed.notify_all()

    def receive(self, timeout: float) -> Frame:
        """Return the next frame, after waiting for at most ``timeout`` seconds.

        Raise ``LaneTimeoutError`` if no frame arrived in time; the lane stays open. Raise
        ``LaneClosedError`` if either side closed the lane, and there are no more frames. Raise
        ``PeerError`` if the other side ended the lane with an error message. Raise ``LaneError`` if
        the lane has ended for another reason.
        """
        started = time.perf_counter()
        end = time.monotonic() + timeout
        with self._changed:
            while not self._inbox and self._error is None and time.monotonic() < end:
                until = end if self.stream is not None else min(end, self._resume_by)
                self._changed.wait(max(0.0, until - time.monotonic()))
                self._expire()
            self._seconds_waiting += time.perf_counter() - started
            if self._inbox:
                self._changed.notify_all()
                return self._inbox.popleft()[0]
            self.check()
        raise LaneTimeoutError(f"the other side sent nothing for {timeout:.1f} s")

    def close(self, error: str | None = None) -> None:
        """End the lane. Further calls have no effect.

        Frames that ``receive`` has not returned are dropped. Queued frames are still sent unless
        there is an ``error``, a message that is sent to the other side in their place. A client
        also waits a few seconds for the server to end the lane.
        """
        reason = f": {error}" if error is not None else ""
        with self._changed:
            self._inbox.clear()
            self._end(LaneClosedError(f"this end has closed the lane{reason}"), error, flush=True)
            connected = self.stream is not None
        if self._is_client and connected:
            self.over.wait(2 * CLOSE_SECONDS)

    def fail(self, error: LaneError) -> None:
        """End the lane with an error, without sending a message to the other side."""
        with self._changed:
            self._end(error)

    def wait_ended(self, timeout: float) -> bool:
        """Wait until the lane ends or the timeout expires; return whether the lane has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self._error is not None, timeout)

    # Only the modules that open streams call the following methods.

    def detach(self, reason: str) -> int:
        """Remove the current stream, if any; return the number of frames that have arrived.

        The stream delivers no more frames, so the number is valid until ``attach`` is called.
        """
        with self._changed:
            stream = self.stream
            self._lose_stream(LaneCutError(reason))
            received = self._delivery.received
        if stream is not None:
            stream.release()
        return received

    def attach(self, stream: Stream) -> None:
        """Continue the lane over a new stream that both ends have confirmed.

        If the lane has ended, use the stream only to send the reason to the other side.
        """
        with self._changed:
            self._expire()
            self.stream = stream
            self.opened += 1
            if self._error is not None:
                self._release_later(stream)
            elif self.opened > self._max_streams:
                message = f"the lane was cut {self._max_streams} times"
                self._end(LaneError(message), message)
            else:
                try:
                    self._delivery.restart(stream.opener.acknowledged)
                except FrameError as error:
                    self._end(error, str(error))
            self._changed.notify_all()

    def messages(self, stream: Stream) -> Iterator[bytes]:
        """Yield the records to send over a stream until it is replaced or the lane has ended."""
        try:
            while (outgoing := self._next(stream)) is not None:
                yield from stream.seal(outgoing, self._delivery.received)
        except Exception as error:
            with self._changed:
                if isinstance(error, LaneCutError):
                    self._lose_stream(error)
                else:
                    failure = FrameError(f"a frame could not be sent: {lane_error(error)}")
                    self._end(failure, "a frame could not be sent")
        with self._changed:
            if self.stream is not stream:
                return
            message, received = self._close_reason, self._delivery.received
        last = Frame(Kind.CLOSE)
        if message is not None:
            last = Frame(Kind.ERROR, fields={"message": printable(message)})
        with suppress(LaneError):
            yield from stream.seal(Outgoing(last, self.limits), received)

    def read(self, stream: Stream, messages: Iterable[bytes]) -> None:
        """Process the records of a stream until it ends or is replaced.

        After the lane has ended, discard records; the stream stays open to send the last frames.
        """
        try:
            for message in messages:
                with self._changed:
                    present, ended = self.stream is stream, self._error is not None
                if not present:
                    return
                if not ended:
                    self._open(stream, message)
                if self._is_client and stream.used_bytes >= self.replace_after_bytes:
                    raise LaneCutError("the stream has reached its maximum number of bytes")
            where = "within a frame" if stream.opener.partial else "before it was closed"
            raise LaneCutError(f"the lane was cut {where}")
        except Exception as error:
            with self._changed:
                if self.stream is stream:
                    self._lose_stream(lane_error(error))
        finally:
            stream.opener.partial = None  # no more records will arrive
            with self._changed:
                if self._error is not None and self.stream in (stream, None):
                    self._finish()

    def _open(self, stream: Stream, record: bytes) -> None:
        """Process a record. End the lane if the record is not allowed."""
        try:
            frame = stream.open(record)
            with self._changed:
                if self.stream is stream and self._error is None:
                    self._take(stream, frame)
        except AlteredRecordError:
            raise  # `read` treats it like a cut
        except Exception as error:
            failure = lane_error(error)
            with self._changed:
                self._end(failure, str(failure))

    def _take(self, stream: Stream, frame: Frame | None) -> None:
        """Process the acknowledgement in a record, and add a completed frame to the inbox."""
        self._delivery.acknowledge(stream.opener.acknowledged)
        if frame is None:
            return
        if frame.kind is Kind.CLOSE:
            self._end(LaneClosedError("the other side has closed the lane"))
        elif frame.kind is Kind.ERROR:
            message = printable(str(frame.fields.get("message")))
            self._end(PeerError(f"the other side gave up: {message}"))
        elif frame.kind is Kind.CONFIRM:
            raise FrameError("received a second CONFIRM")
        size = frame.memory_bytes(stream.opener.frame_bytes)
        while self._error is None and self.stream is stream:
            if self._has_room(size):
                self._inbox.append((frame, size))
                self._delivery.received += 1
                self._changed.notify_all()
                break
            self._changed.wait()

    def _next(self, stream: Stream) -> Outgoing | None:
        """Wait for the next frame to send over a stream; return None after the last one."""
        with self._changed:
            while self.stream is stream:
                outgoing = self._delivery.next()
                if outgoing is not None or self._error is not None:
                    self._changed.notify_all()  # ``send`` may queue another frame
                    return outgoing
                self._changed.wait()
        return None

    def _has_room(self, size: int) -> bool:
        """Return whether the inbox can take a frame, which may be larger if it is the only one."""
        total = size + sum(waiting for _, waiting in self._inbox)
        fits = len(self._inbox) < _FRAMES_AHEAD and total <= self.limits.hidden_bytes
        return not self._inbox or fits

    def _may_queue(self) -> bool:
        fits = self._delivery.unsent_bytes <= self.limits.queue_bytes
        return fits or self.stream is None or self._error is not None

    def _expire(self) -> None:
        """End the lane if a cut stream was not replaced in time."""
        if self.stream is None and time.monotonic() >= self._resume_by:
            error = LaneCutError(
                f"{self._cut}; the lane was not resumed within {self._resume_timeout:g} s "
                "(split.resume-timeout)"
            )
            self._end(error, "the lane was not resumed within split.resume-timeout")

    def _lose_stream(self, cut: LaneError) -> None:
        if self.stream is not None:
            self._before += self.stream.traffic
            self.stream = None
            self._cut = copy.copy(cut)
            self._resume_by = time.monotonic() + self._resume_timeout
            if self._error is None:
                _LOG.info("%r: %s", self, printable(str(cut)))
        self._changed.notify_all()

    def _end(self, error: LaneError, message: str | None = None, flush: bool = False) -> None:
        """End the lane with an error that ``send`` and ``receive`` raise from now on.

        Further calls have no effect. Send the message to the other end, or ``CLOSE`` if it is None.
        If ``flush`` and there is no message, send queued frames first.
        """
        if self._error is not None:
            return
        # Copy the error, because its traceback references a stream, its keys and a record.
        self._error, self._close_reason = copy.copy(error), message
        self.ended_at = time.monotonic()
        if not flush or message is not None:
            self._delivery.drop_unsent()
        if self.stream is None:
            self._finish()
        else:
            self._release_later(self.stream)
        self._changed.notify_all()
        _LOG.info("%r ended: %s", self, printable(str(error)))

    def _finish(self) -> None:
        """Release the stream and all frames after the end of the lane."""
        self._lose_stream(LaneCutError("the lane has ended"))
        self._delivery.clear()
        if self._closing is not None:
            self._closing.cancel()
        self.over.set()

    def _release_later(self, stream: Stream) -> None:
        """Limit the time for sending the last frames over a stream."""
        self._closing = threading.Timer(CLOSE_SECONDS, stream.release)
        self._closing.daemon = True
        self._closing.start()
