"""A lane that outlasts cuts: what did not arrive before one is sent again over the next lane.

Each end counts the frames that it gets and says in every frame that it sends how many there were.
What the other end has not said to have is kept. So every frame arrives once and in its order, and
neither end's computation notices that there was a cut.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import torch

from split.lane.lane import Lane
from split.lane.traffic import Traffic
from split.protocol.errors import FrameError, LaneClosedError, LaneCutError, LaneTimeoutError
from split.protocol.frames import Frame, Kind, Value
from split.protocol.tickets import Ticket

# Fields: frames that the sender has, in every frame; and in the first ones of a lane that follows.
SEEN, RESUME = "seen", "resume"
_TICKETS = 8


class LastingLane:
    """One end of lanes that follow each other. Its methods may be called from any thread.

    Of a lane that was followed, or was cut before it could follow, only the account is kept.

    Args:
        lane: the first one.

    Attributes:
        identity: run, round and node.
        present: the lane that frames go over.
        opened: how many lanes there have been, with those that were cut before anything went over
            them.
        tickets: at the server, those for connecting again of which the client may use one: it may
            not know of the last lanes, for they may be cut before it has an answer.

    """

    def __init__(self, lane: Lane) -> None:
        self.identity = lane.identity
        self.present = lane
        self.opened = 1
        self.tickets: tuple[Ticket, ...] = (lane.resumption,)
        self._changed = threading.Condition()  # goes with all of these
        self._offered: Lane | None = None  # the newest that the client has opened
        self._following: Lane | None = None  # of which the ends agree how to go on
        self._before = Traffic()
        self._kept: deque[Frame] = deque()  # that the other end may not have
        self._seen = 0  # frames before these: the other end has them
        self._received = 0
        self._closed = False
        self._last_words: str | None = None

    @property
    def unseen(self) -> int:
        """How many frames the other end has not said to have."""
        return len(self._kept)

    @property
    def traffic(self) -> Traffic:
        """The account of all lanes."""
        with self._changed:
            return sum((lane.traffic for lane in self._lanes()), self._before)

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, torch.Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Queue a frame, and keep it until the other end has it.

        The arguments are those of ``Lane.send``; tensors must not change before the answer to the
        frame has come.

        Raises:
            LaneError: the lane has ended otherwise than by a cut, or doesn't allow the frame.

        """
        with self._changed:
            said = {**(fields or {}), SEEN: self._received}
            frame = Frame(kind, step, micro_batch, dict(tensors or {}), said)
            self._send(frame)
            self._kept.append(frame)

    def receive(self, timeout: float) -> Frame:
        """Wait for the next frame.

        Raises:
            LaneCutError: the lane was cut; it can be followed by another one.
            LaneError: as ``Lane.receive`` does.

        """
        frame = self.present.receive(timeout)
        with self._changed:
            self._received += 1
            seen = _count(frame, SEEN)
            if seen is not None and seen > self._seen:  # it is less in what was sent again
                self._forget(seen)
        return frame

    def check(self) -> None:
        """Raise what the present lane ended with, if it has."""
        self.present.check()

    def ask(self, lane: Lane, timeout: float) -> None:
        """Go on over another lane, at the client.

        Args:
            lane: which was opened with what both ends have of one before.
            timeout: seconds to wait for the server's answer.

        Raises:
            LaneCutError: it was cut, too.
            LaneTimeoutError: no answer came in time.
            LaneError: it ended otherwise, or the server doesn't go on with what this end has.

        """
        with self._changed:
            self.opened += 1
            self._following = lane
        if self._closed:  # before it was among the others
            lane.close(self._last_words)
        try:
            lane.send(Kind.JOIN, fields={RESUME: self._received})
            self._go_on(lane, _first(lane, Kind.WELCOME, timeout))
        except LaneCutError:
            self._drop(lane)
            raise

    def offer(self, lane: Lane) -> None:
        """Let a lane that the client has opened follow, at the server; those before it are cut.

        The client may know sooner than the server that they were.
        """
        with self._changed:
            self.opened += 1
            for before in self._lanes():
                before.cut("the client has opened another lane")
            if self._offered is not None:
                self._before += self._offered.traffic
            self._offered = lane
            if self._closed:
                lane.close(self._last_words)
            self._changed.notify_all()

    def accept(self, timeout: float) -> None:
        """Go on over the newest lane that the client has opened, at the server.

        Args:
            timeout: seconds within which one must be there, and the client have said what it has.

        Raises:
            LaneTimeoutError: it wasn't.
            LaneError: this end was closed, the lane ended otherwise than by a cut, or the client
                doesn't go on with what this end has.

        """
        end = time.monotonic() + timeout
        while (lane := self._next(end)) is not None:
            with suppress(LaneCutError, LaneTimeoutError):
                join = _first(lane, Kind.JOIN, max(0.0, end - time.monotonic()))
                # Before the client can have the answer, and use it.
                self.tickets = (*self.tickets, lane.resumption)[-_TICKETS:]
                lane.send(Kind.WELCOME, fields={RESUME: self._received})
                self._go_on(lane, join)
                return
            self._drop(lane)
        raise LaneTimeoutError(f"no other lane came within {timeout:g} s")

    def close(self, error: str | None = None) -> None:
        """End all lanes, and any that follows; see ``Lane.close``."""
        with self._changed:
            if not self._closed:
                self._closed, self._last_words = True, error
            lanes = self._lanes()
            self._changed.notify_all()
        for lane in lanes:
            lane.close(error)

    def _lanes(self) -> list[Lane]:
        lanes = (self.present, self._following, self._offered)
        return [lane for lane in lanes if lane is not None]

    def _next(self, end: float) -> Lane | None:
        """Wait for a lane that the client opens, at most until ``end``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._offered is not None or self._closed, end - time.monotonic()
            )
            if self._closed:
                raise LaneClosedError(f"this end has closed the lane: {self._last_words}")
            if self._offered is None or time.monotonic() >= end:
                return None
            self._following, self._offered = self._offered, None
            return self._following

    def _drop(self, lane: Lane) -> None:
        """Give a lane up that was to follow."""
        with self._changed:
            lane.cut("it could not follow another one")
            self._before += lane.traffic
            self._following = None

    def _go_on(self, lane: Lane, said: Frame) -> None:
        """Send what the other end lacks, and from now on all the rest, over another lane."""
        seen = _count(said, RESUME)
        if seen is None:
            raise FrameError(f"a lane was to resume with {RESUME} = {said.fields.get(RESUME)!r}")
        with self._changed:
            self._forget(seen)
            self.present.cut("another lane has followed")
            self._before += self.present.traffic
            self.present, self._following = lane, None
            for frame in self._kept:
                self._send(frame)

    def _send(self, frame: Frame) -> None:
        with suppress(LaneCutError):  # which receive raises
            self.present.send(
                frame.kind, frame.step, frame.micro_batch, frame.tensors, frame.fields
            )

    def _forget(self, seen: int) -> None:
        if not self._seen <= seen <= self._seen + len(self._kept):
            raise FrameError(
                f"the other side says to have {seen} frames; it had {self._seen}, and "
                f"{len(self._kept)} more were sent"
            )
        while self._seen < seen:
            self._kept.popleft()
            self._seen += 1


def _first(lane: Lane, kind: Kind, timeout: float) -> Frame:
    frame = lane.receive(timeout)
    if frame.kind is not kind:
        raise FrameError(f"a lane was to resume with {kind.name}, not with {frame.kind.name}")
    return frame


def _count(frame: Frame, name: str) -> int | None:
    value = frame.fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
