"""A lane that outlasts cuts: what did not arrive before one is sent again over the next lane.

Each end counts the frames that it gets and says in every frame that it sends how many there were.
What the other end has not said to have is kept. So every frame arrives once and in its order, and
neither end's computation notices that there was a cut.
"""

import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import torch

from split.frames import Frame, Kind, Value
from split.lane import Lane
from split.lane_end import Traffic
from split.lane_errors import FrameError, LaneCutError

# Fields: frames that the sender has, in every frame; and in the first ones of a lane that follows.
SEEN, RESUME = "seen", "resume"


class LastingLane:
    """One end of lanes that follow each other. Its methods may be called from any thread.

    Args:
        lane: the first one.

    Attributes:
        identity: run, round and node.
        lanes: all there have been, with those that were cut before anything went over them.
        present: the one that frames go over.

    """

    def __init__(self, lane: Lane) -> None:
        self.identity = lane.identity
        self.lanes = [lane]
        self.present = lane
        self._lock = threading.Lock()
        self._kept: deque[Frame] = deque()  # that the other end may not have
        self._seen = 0  # frames before these: the other end has them
        self._received = 0
        self._closed = False
        self._last_words: str | None = None

    @property
    def ended(self) -> bool:
        """Whether there is no lane at present."""
        return self.present.ended

    @property
    def unseen(self) -> int:
        """How many frames the other end has not said to have."""
        return len(self._kept)

    @property
    def traffic(self) -> Traffic:
        """The account of all lanes."""
        accounts = [vars(lane.traffic) for lane in self.lanes]
        return Traffic(**{name: sum(each[name] for each in accounts) for name in accounts[0]})

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
        with self._lock:
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
        with self._lock:
            self._received += 1
            seen = frame.fields.get(SEEN)
            if isinstance(seen, int) and seen > self._seen:  # it is less in what was sent again
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
            LaneError: it ended otherwise, or the server doesn't go on with what this end has.

        """
        self._add(lane)
        lane.send(Kind.JOIN, fields={RESUME: self._received})
        self._go_on(lane, lane.receive(timeout))

    def accept(self, lane: Lane, timeout: float) -> None:
        """Go on over another lane, at the server; see ``ask``."""
        self._add(lane)
        join = lane.receive(timeout)
        lane.send(Kind.WELCOME, fields={RESUME: self._received})
        self._go_on(lane, join)

    def close(self, error: str | None = None) -> None:
        """End all lanes, and any that follows; see ``Lane.close``."""
        self._closed, self._last_words = True, error
        for lane in self.lanes:
            lane.close(error)

    def _add(self, lane: Lane) -> None:
        self.lanes.append(lane)
        if self._closed:  # before it was among the others
            lane.close(self._last_words)

    def _go_on(self, lane: Lane, said: Frame) -> None:
        """Send what the other end lacks, and from now on all the rest, over another lane."""
        seen = said.fields.get(RESUME)
        if not isinstance(seen, int):
            raise FrameError(f"a lane was to resume with {RESUME} = {seen!r}")
        with self._lock:
            self._forget(seen)
            self.present = lane
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
