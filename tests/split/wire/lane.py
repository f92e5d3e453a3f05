"""A client's lane, implemented from docs/wire.md: streams, and their replacement after cuts."""

import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from tests.split.wire.handshake import Handshake, Invitation
from tests.split.wire.records import (
    Frame,
    Kind,
    Opener,
    Sealer,
    Value,
    from_wire,
    read_payload,
    to_wire,
    write_payload,
)
from tests.split.wire.stream import CutError, Stream

HANDSHAKE_SECONDS = 10.0
FIRST_PATIENCE_SECONDS = 15.0
CLOSE_SECONDS = 5.0
MAX_BYTES_OF_A_KEY = 2**38 - 2**32


class LaneEndedError(Exception):
    """The server has ended the lane, or violated the protocol."""


class Lane:
    """One client's lane, used by one thread.

    Args:
        invitation: Invitation with the ticket, the server's key and its address.
        wire: The run's ``split.wire-dtype``.
        deadline: Deadline of the lane, on ``time.monotonic``'s clock.
        resume_timeout: ``split.resume-timeout``.
        retry_seconds: Seconds between two attempts to open a stream.
        max_bytes_of_a_key: Bytes in one direction after which a stream is replaced.
        dial: Function that opens a stream.

    Attributes:
        streams: Number of confirmed handshakes.

    """

    def __init__(
        self,
        invitation: Invitation,
        wire: str,
        deadline: float,
        resume_timeout: float = 30.0,
        retry_seconds: float = 1.0,
        max_bytes_of_a_key: int = MAX_BYTES_OF_A_KEY,
        dial: Callable[[str, float], Stream] = Stream,
    ) -> None:
        self._invitation, self._wire = invitation, wire
        self._deadline, self._resume_timeout = deadline, resume_timeout
        self._retry_seconds, self._dial = retry_seconds, dial
        self._max_bytes_of_a_key = max_bytes_of_a_key
        self._ticket = invitation.ticket
        self._kept: deque[Frame] = deque()
        self._acknowledged = 0  # of the frames sent
        self._received = 0
        self.streams = 0
        self._connect(FIRST_PATIENCE_SECONDS)

    def send(
        self,
        kind: Kind,
        step: int = 0,
        micro_batch: int = 0,
        tensors: Mapping[str, torch.Tensor] | None = None,
        fields: Mapping[str, Value] | None = None,
    ) -> None:
        """Send a frame; convert hidden states and gradients to the wire type."""
        written: dict[str, torch.Tensor] = {}
        for name, tensor in (tensors or {}).items():
            if name in ("hidden", "gradient"):
                written |= to_wire(self._wire, name, tensor.detach().cpu())
            elif name == "lengths":
                written[name] = tensor.to(torch.int32)
            else:
                written[name] = tensor.detach().float().cpu()
        payload = write_payload(written, dict(fields or {}))
        frame = Frame(kind, step, micro_batch, payload)
        self._kept.append(frame)
        self._put(frame)
        if max(self._sealer.encrypted, self._opener.decrypted) > self._max_bytes_of_a_key:
            self._stream.close()

    def receive(self, timeout: float) -> Frame:
        """Return the next delivered frame; replace streams that are cut while waiting.

        Raises:
            LaneEndedError: The server has sent a reason, or no stream can be opened.
            TimeoutError: No frame arrived in time.

        """
        end = time.monotonic() + timeout
        while True:
            try:
                frame = self._next(end - time.monotonic())
            except CutError:
                self._stream.close()
                self._connect(self._resume_timeout)
                continue
            except ValueError as error:
                self._stream.close()
                raise LaneEndedError(str(error)) from error
            if frame.kind.is_delivered:
                self._received += 1
                for name in ("hidden", "gradient"):
                    if name in frame.tensors:
                        frame.tensors[name] = from_wire(self._wire, name, frame.tensors)
                return frame
            self._put(Frame(Kind.CLOSE, payload=write_payload({}, {})))
            reason = frame.fields.get("message", "no reason given")
            raise LaneEndedError(f"{frame.kind.name}: {reason}")

    def close(self) -> None:
        """Send CLOSE, and wait for the server's CLOSE."""
        self._put(Frame(Kind.CLOSE, payload=write_payload({}, {})))
        end = time.monotonic() + CLOSE_SECONDS
        try:
            while self._next(end - time.monotonic()).kind is not Kind.CLOSE:
                pass
            while True:
                self._stream.receive(end - time.monotonic())
        except (CutError, TimeoutError):
            pass
        self._stream.close()

    def _connect(self, patience: float) -> None:
        """Open the next stream, and resend frames that the server has not received."""
        until = time.monotonic() + patience
        while True:
            try:
                self._open_stream()
                return
            except CutError as error:
                self._stream.close()
                if time.monotonic() > (self._deadline if error.busy else until):
                    raise LaneEndedError(f"no stream can be opened: {error}") from error
                time.sleep(self._retry_seconds)

    def _open_stream(self) -> None:
        self._stream = self._dial(self._invitation.address, self._deadline)
        handshake = Handshake(self._invitation, self._ticket)
        try:
            self._stream.send(handshake.hello)
            third, secrets = handshake.answer(self._stream.receive(HANDSHAKE_SECONDS))
            self._stream.send(third)
            self._sealer, self._opener = Sealer(secrets.up), Opener(secrets.down)
            confirm = self._opener.open(self._stream.receive(HANDSHAKE_SECONDS))
            if confirm is None or confirm.kind is not Kind.CONFIRM:
                raise ValueError("the server's first record is no CONFIRM")
        except (ValueError, TimeoutError) as error:
            # Nothing of this is authentic, so it is a cut whatever it is.
            raise CutError(str(error)) from error
        self._ticket = secrets.resumption
        self.streams += 1
        self._forget(confirm.acknowledged)
        self._put(Frame(Kind.CONFIRM, payload=write_payload({}, {})))
        for frame in self._kept:
            self._put(frame)

    def _put(self, frame: Frame) -> None:
        for record in self._sealer.seal(frame, self._received):
            self._stream.send(record)

    def _next(self, timeout: float) -> Frame:
        end = time.monotonic() + timeout
        while True:
            frame = self._opener.open(self._stream.receive(max(0.0, end - time.monotonic())))
            if frame is not None:
                self._forget(frame.acknowledged)
                frame.tensors, frame.fields = read_payload(frame.payload)
                return frame

    def _forget(self, acknowledged: int) -> None:
        """Delete the frames that the server has acknowledged."""
        if not self._acknowledged <= acknowledged <= self._acknowledged + len(self._kept):
            raise LaneEndedError(f"the server acknowledges {acknowledged} frames")
        while self._acknowledged < acknowledged:
            self._kept.popleft()
            self._acknowledged += 1
