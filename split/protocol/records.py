"""Frames divided into records, and each record encrypted by itself.

A record is a header of 32 bytes, at most 1 MiB of payload under AES-256-GCM, and the tag of 16
bytes; the header is authenticated with it. The nonce is the header's counter, which begins at 0 in
each direction and has to come without a gap: a record that was lost, repeated, moved or altered, or
comes from another lane or direction, doesn't decrypt as the one that is due. Anybody on the way can
cause that, so it is told apart from a record that the other end may not send.
"""

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from split.protocol import payload
from split.protocol.errors import AlteredRecordError, FrameError, LaneCutError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.payload import Description, read_description

VERSION = 3
RECORD_BYTES = 2**20  # of payload
TAG_BYTES = 16
_FINAL = 1
# version, kind, flags, zero; step, micro-batch, acknowledged; counter, total payload.
_HEADER = struct.Struct(">BBBxIIIQQ")
HEADER_BYTES = _HEADER.size
MAX_RECORD_BYTES = HEADER_BYTES + RECORD_BYTES + TAG_BYTES
# 2³⁴ blocks under one key: an adversary's advantage against AES-GCM stays below 2⁻⁶⁰.
MAX_BYTES = 2**38


@dataclass(frozen=True)
class RecordHeader:
    """The header of a record, in the clear and authenticated.

    Attributes:
        kind: Kind of the frame.
        final: Whether the frame ends with this record.
        step: Step of the frame.
        micro_batch: Micro-batch of the frame.
        acknowledged: Frames that the sender has received over the whole lane, below 2³².
        counter: Number of the record, in its direction of the stream.
        total: Payload of the whole frame in bytes.

    """

    kind: Kind
    final: bool
    step: int
    micro_batch: int
    acknowledged: int
    counter: int
    total: int

    def pack(self) -> bytes:
        """Return the header's 32 bytes."""
        return _HEADER.pack(
            VERSION,
            self.kind,
            _FINAL if self.final else 0,
            self.step,
            self.micro_batch,
            self.acknowledged,
            self.counter,
            self.total,
        )


class Sealer:
    """Encrypts one direction of a lane.

    Args:
        key: AES-256 key, used for nothing else.

    Attributes:
        seconds: Time spent on encryption.

    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._counter = 0
        self._left = MAX_BYTES
        self._scratch = bytearray()  # as large as the largest record so far
        self.seconds = 0.0

    def seal(
        self, kind: Kind, step: int, micro_batch: int, acknowledged: int, content: memoryview
    ) -> Iterator[bytes]:
        """Yield the records of a frame's payload in order.

        Raises:
            LaneCutError: The key has encrypted as much as it may; the lane needs a new stream.

        """
        total = len(content)
        if total > self._left:
            raise LaneCutError(f"a stream's key encrypts at most {MAX_BYTES} bytes")
        self._left -= total
        for begin in range(0, total, RECORD_BYTES):
            started = time.perf_counter()
            piece = content[begin : begin + RECORD_BYTES]
            final = begin + len(piece) == total
            header = RecordHeader(
                kind=kind,
                final=final,
                step=step,
                micro_batch=micro_batch,
                acknowledged=acknowledged,
                counter=self._counter,
                total=total,
            ).pack()
            size = HEADER_BYTES + len(piece) + TAG_BYTES
            if len(self._scratch) < size:
                self._scratch = bytearray(size)
            scratch = memoryview(self._scratch)[:size]
            scratch[:HEADER_BYTES] = header
            nonce = _nonce(self._counter)
            self._counter += 1
            self._cipher.encrypt_into(nonce, piece, header, scratch[HEADER_BYTES:])
            record = bytes(scratch)  # gRPC takes nothing else
            self.seconds += time.perf_counter() - started
            yield record


class Opener:
    """Decrypts one direction of a lane and puts its frames together.

    Args:
        key: AES-256 key of that direction.
        limits: Limits of what the other side may send.

    Attributes:
        acknowledged: Frames that the other side has received, by the last record's header.
        frame_bytes: Payload of the last record's frame.
        seconds_crypto: Spent on decryption.
        seconds_serialisation: Spent on reading payloads.

    """

    def __init__(self, key: bytes, limits: Limits) -> None:
        self._cipher = AESGCM(key)
        self._limits = limits
        self._counter = 0
        self._partial: _Partial | None = None
        self.acknowledged = 0
        self.frame_bytes = 0
        self.seconds_crypto = 0.0
        self.seconds_serialisation = 0.0

    @property
    def mid_frame(self) -> bool:
        """Whether the last frame is not complete."""
        return self._partial is not None

    def open(self, record: bytes) -> Frame | None:
        """Decrypt the next record; return the frame that it completes, if it does.

        The opener can't be used after an error.

        Raises:
            AlteredRecordError: It was altered, repeated, moved or left out, or belongs to another
                lane.
            FrameError: The other end has sent it, but the frame is not one that the lane allows.

        """
        size = len(record) - HEADER_BYTES - TAG_BYTES
        if not 1 <= size <= RECORD_BYTES:
            raise AlteredRecordError(f"a record of {len(record)} bytes is too short or too long")
        try:
            header = self._header(record, size)
        except FrameError:
            # The other end is to blame only if it has encrypted that. No more than the record's
            # own bytes is allocated.
            self._decrypt(record, memoryview(bytearray(size)))
            raise
        partial = self._partial
        if partial is None:
            # Nothing about the frame is known for certain yet: take only what this record needs.
            buffer = torch.empty(size, dtype=torch.uint8)
            self._decrypt(record, buffer.numpy().data)
            started = time.perf_counter()
            description = read_description(
                content=buffer.numpy().data,
                size=header.total,
                kind=header.kind,
                limits=self._limits,
            )
            partial = _Partial(header=header, description=description, first=buffer, received=size)
            self.seconds_serialisation += time.perf_counter() - started
        else:
            begin = partial.received
            target = partial.buffer.numpy().data[begin : begin + size]
            self._decrypt(record, target)
            partial.received += size
        self.acknowledged = header.acknowledged
        self.frame_bytes = header.total
        if not header.final:
            self._partial = partial
            return None
        self._partial = None
        started = time.perf_counter()
        frame = payload.read(
            description=partial.description,
            buffer=partial.buffer,
            kind=header.kind,
            step=header.step,
            micro_batch=header.micro_batch,
        )
        self.seconds_serialisation += time.perf_counter() - started
        return frame

    def drop(self) -> None:
        """Forget the frame that is not complete: no more records come."""
        self._partial = None

    def _header(self, record: bytes, size: int) -> RecordHeader:
        """Parse a record's header and compare it with what has to come now."""
        version, number, flags, step, micro_batch, acknowledged, counter, total = (
            _HEADER.unpack_from(record)
        )
        if version != VERSION:
            raise FrameError(f"a record has version {version}, not {VERSION}")
        if number not in Kind.__members__.values():
            raise FrameError(f"there is no frame of kind {number}")
        header = RecordHeader(
            kind=Kind(number),
            final=flags == _FINAL,
            step=step,
            micro_batch=micro_batch,
            acknowledged=acknowledged,
            counter=counter,
            total=total,
        )
        if header.pack() != record[:HEADER_BYTES]:
            raise FrameError("a record's header has bits set that mean nothing")
        if counter != self._counter:
            raise FrameError(
                f"record {counter} came where {self._counter} was due: repeated, moved or left out"
            )
        received = 0
        if self._partial is not None:
            received = self._partial.received
            if not self._partial.continues(header):
                raise FrameError("a frame was interrupted by another one")
        else:
            self._limits.check_bytes(header.kind, total)
        if size != min(total - received, RECORD_BYTES) or header.final != (
            received + size == total
        ):
            raise FrameError("a record's length doesn't fit its frame")
        return header

    def _decrypt(self, record: bytes, target: memoryview) -> None:
        """Decrypt a record as the one that is due, whatever number its header has."""
        started = time.perf_counter()
        try:
            self._cipher.decrypt_into(
                _nonce(self._counter),
                memoryview(record)[HEADER_BYTES:],
                memoryview(record)[:HEADER_BYTES],
                target,
            )
        except InvalidTag:
            raise AlteredRecordError(
                "a record was altered, repeated, moved or left out, or is of another lane or "
                "direction"
            ) from None
        self._counter += 1
        self.seconds_crypto += time.perf_counter() - started


class _Partial:
    """A frame whose first records have arrived."""

    def __init__(
        self, header: RecordHeader, description: Description, first: torch.Tensor, received: int
    ) -> None:
        self._header = header
        self.description = description
        self.received = received
        self.buffer = first
        if not header.final:
            self.buffer = torch.empty(header.total, dtype=torch.uint8)
            self.buffer[:received] = first

    def continues(self, header: RecordHeader) -> bool:
        mine, other = self._header, header
        return (mine.kind, mine.step, mine.micro_batch, mine.total) == (
            other.kind,
            other.step,
            other.micro_batch,
            other.total,
        )


def _nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "big")
