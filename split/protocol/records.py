"""Division of frames into records, which are encrypted separately.

A record consists of a header of 32 bytes, at most 1 MiB of payload encrypted with AES-256-GCM, and
the tag of 16 bytes. The header is authenticated as associated data. The nonce is the counter in the
header, which starts at 0 in each direction and increases by 1. Therefore a record fails to decrypt
if it was repeated, reordered or altered, if it follows a lost record, or if it comes from a
different lane or direction. Anyone on the network can cause this, so it raises a separate error.
"""

import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from split.protocol import payload
from split.protocol.errors import AlteredRecordError, FrameError, LaneCutError
from split.protocol.frames import Frame, Kind, Limits
from split.protocol.payload import Description, read_description

RECORD_VERSION = 4
RECORD_BYTES = 2**20  # maximum payload of a record
TAG_BYTES = 16
_NONCE_BYTES = 12
_HEADER = struct.Struct(">BBBxIIIQQ")  # the version, and the fields of ``RecordHeader``
HEADER_BYTES = _HEADER.size
MAX_RECORD_BYTES = HEADER_BYTES + RECORD_BYTES + TAG_BYTES
# 2³⁴ AES blocks per key keep an adversary's advantage against AES-GCM below 2⁻⁶⁰.
MAX_BYTES_PER_KEY = 2**38


class RecordHeader(NamedTuple):
    """The header of a record, which is authenticated but not encrypted."""

    kind: Kind
    final: bool  # whether the frame ends with this record
    step: int
    micro_batch: int
    acknowledged: int  # number of frames that the sender has received over the lane, below 2³²
    counter: int  # index of the record in its direction of the stream
    total: int  # payload size of the whole frame in bytes

    def pack(self) -> bytes:
        """Return the header's 32 bytes."""
        return _HEADER.pack(RECORD_VERSION, *self)

    @property
    def frame(self) -> tuple[Kind, int, int, int]:
        """The fields that are equal in all records of a frame."""
        return self.kind, self.step, self.micro_batch, self.total


class Sealer:
    """Encryption of one direction of a stream, with a key that is used for nothing else."""

    def __init__(self, key: bytes, max_bytes: int = MAX_BYTES_PER_KEY) -> None:
        self._cipher = AESGCM(key)
        self._counter = 0
        self._max_bytes = self._left = max_bytes
        self._scratch = bytearray()  # buffer of the size of the largest record so far
        self.seconds = 0.0  # time spent on encryption

    def seal(self, frame: Frame, acknowledged: int, content: memoryview) -> Iterator[bytes]:
        """Yield the records of a frame in order; ``content`` is its payload.

        Raise a LaneCutError if the key has reached its limit of bytes: the lane needs a new stream.
        """
        total = len(content)
        if total > self._left:
            raise LaneCutError(f"a stream's key encrypts at most {self._max_bytes} bytes")
        self._left -= total
        for begin in range(0, total, RECORD_BYTES):
            started = time.perf_counter()
            piece = content[begin : begin + RECORD_BYTES]
            final = begin + len(piece) == total
            where = frame.kind, final, frame.step, frame.micro_batch
            header = RecordHeader(*where, acknowledged, self._counter, total).pack()
            size = HEADER_BYTES + len(piece) + TAG_BYTES
            if len(self._scratch) < size:
                self._scratch = bytearray(size)
            scratch = memoryview(self._scratch)[:size]
            scratch[:HEADER_BYTES] = header
            nonce = self._counter.to_bytes(_NONCE_BYTES)
            self._counter += 1
            self._cipher.encrypt_into(nonce, piece, header, scratch[HEADER_BYTES:])
            record = bytes(scratch)  # gRPC requires bytes
            self.seconds += time.perf_counter() - started
            yield record


class Opener:
    """Decryption of one direction of a stream, and reassembly of its frames."""

    def __init__(self, key: bytes, limits: Limits) -> None:
        self._cipher = AESGCM(key)
        self._limits = limits
        self._counter = 0
        self.partial: _Partial | None = None  # the last frame, while it is incomplete
        self.acknowledged = 0  # number of frames received by the other side, from the last header
        self.frame_bytes = 0  # payload size of the last record's frame
        self.seconds_crypto = 0.0
        self.seconds_serialisation = 0.0

    def open(self, record: bytes) -> Frame | None:
        """Decrypt the next record; return the frame if the record completes it, otherwise None.

        Do not use the object after an error.

        Raise ``AlteredRecordError`` if the record was altered, repeated or reordered, follows an
        omitted one, or belongs to a different lane. Raise ``FrameError`` if the other side sent the
        record, but the frame is not allowed.
        """
        size = len(record) - HEADER_BYTES - TAG_BYTES
        if not 1 <= size <= RECORD_BYTES:
            raise AlteredRecordError(f"a record of {len(record)} bytes is too short or too long")
        try:
            header = self._header(record, size)
        except FrameError:
            # Raise this error only if the other side encrypted this record; otherwise _decrypt
            # raises. Allocate no more memory than the record's size.
            self._decrypt(record, memoryview(bytearray(size)))
            raise
        partial = self.partial
        if partial is None:
            # The header is not authenticated yet, so allocate memory for this record only.
            buffer = torch.empty(size, dtype=torch.uint8)
            self._decrypt(record, buffer.numpy().data)
            started = time.perf_counter()
            description = read_description(
                buffer.numpy().data, header.total, header.kind, self._limits
            )
            if not header.final:
                first, buffer = buffer, torch.empty(header.total, dtype=torch.uint8)
                buffer[:size] = first
            partial = _Partial(header, description, buffer, received=size)
            self.seconds_serialisation += time.perf_counter() - started
        else:
            begin = partial.received
            target = partial.buffer.numpy().data[begin : begin + size]
            self._decrypt(record, target)
            partial.received += size
        self.acknowledged = header.acknowledged
        self.frame_bytes = header.total
        if not header.final:
            self.partial = partial
            return None
        self.partial = None
        started = time.perf_counter()
        frame = payload.read(
            partial.description, partial.buffer, header.kind, header.step, header.micro_batch
        )
        self.seconds_serialisation += time.perf_counter() - started
        return frame

    def _header(self, record: bytes, size: int) -> RecordHeader:
        """Parse a record's header and check that it is expected now."""
        version, number, flags, *others = _HEADER.unpack_from(record)
        if version != RECORD_VERSION:
            raise FrameError(f"a record has version {version}, not {RECORD_VERSION}")
        if number not in Kind.__members__.values():
            raise FrameError(f"there is no frame of kind {number}")
        header = RecordHeader(Kind(number), flags == 1, *others)
        if header.pack() != record[:HEADER_BYTES]:
            raise FrameError("a record's header has unknown bits set")
        if header.counter != self._counter:
            raise FrameError(
                f"received record {header.counter}, expected {self._counter}: a record was "
                "repeated, moved or left out"
            )
        left = header.total
        if self.partial is None:
            self._limits.check_bytes(header.kind, header.total)
        else:
            left -= self.partial.received
            if header.frame != self.partial.header.frame:
                raise FrameError("a frame was interrupted by another one")
        if size != min(left, RECORD_BYTES) or header.final != (size == left):
            raise FrameError("a record's length or its final flag doesn't match its frame")
        return header

    def _decrypt(self, record: bytes, target: memoryview) -> None:
        """Decrypt a record with the expected counter, whatever counter its header contains."""
        started = time.perf_counter()
        try:
            self._cipher.decrypt_into(
                self._counter.to_bytes(_NONCE_BYTES),
                memoryview(record)[HEADER_BYTES:],
                memoryview(record)[:HEADER_BYTES],
                target,
            )
        except InvalidTag:
            raise AlteredRecordError(
                "a record was altered, repeated, moved or left out, or is from a different lane "
                "or direction"
            ) from None
        self._counter += 1
        self.seconds_crypto += time.perf_counter() - started


@dataclass
class _Partial:
    """A frame that has arrived in part."""

    header: RecordHeader
    description: Description
    buffer: torch.Tensor  # buffer for the whole payload
    received: int
