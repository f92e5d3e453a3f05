"""Records, frames and payloads of docs/wire.md, implemented from that page."""

import json
import struct
from dataclasses import dataclass, field
from enum import IntEnum

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from safetensors.torch import load, save

from tests.split.wire.stream import CutError

PIECE_BYTES = 2**20
HEADER = struct.Struct(">BBBBIIIQQ")
TAG_BYTES = 16
VERSION = 4
LAST = 1  # bit 0 of the flags


class Kind(IntEnum):
    """Kinds of frames."""

    JOIN = 1
    WELCOME = 2
    HIDDEN = 3
    GRADIENT = 4
    STEP = 5
    AVERAGE = 6
    END = 7
    ERROR = 8
    CLOSE = 9
    CONFIRM = 10

    @property
    def is_delivered(self) -> bool:
        """Whether frames of the kind are counted, acknowledged and sent again."""
        return self <= Kind.END


Value = str | bool | int | float


@dataclass
class Frame:
    """One frame, with its payload as sent over the network.

    Attributes:
        acknowledged: In a received frame, the acknowledgement in its last record's header.

    """

    kind: Kind
    step: int = 0
    micro_batch: int = 0
    payload: bytes = b""
    acknowledged: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)


class Sealer:
    """Encrypts one direction of a stream.

    Attributes:
        encrypted: Number of bytes encrypted with this key so far.

    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._counter = 0
        self.encrypted = 0

    def seal(self, frame: Frame, acknowledged: int) -> list[bytes]:
        """Return the records of a frame."""
        records = []
        for begin in range(0, len(frame.payload), PIECE_BYTES):
            piece = frame.payload[begin : begin + PIECE_BYTES]
            header = HEADER.pack(
                VERSION,
                frame.kind,
                LAST if begin + len(piece) == len(frame.payload) else 0,
                0,
                frame.step,
                frame.micro_batch,
                acknowledged,
                self._counter,
                len(frame.payload),
            )
            nonce = struct.pack(">IQ", 0, self._counter)
            records.append(header + self._cipher.encrypt(nonce, piece, header))
            self._counter += 1
            self.encrypted += len(piece)
        return records


class Opener:
    """Decrypts the other direction of a stream, record by record.

    Attributes:
        decrypted: Number of bytes decrypted with this key so far.

    """

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._counter = 0
        self._pieces: list[bytes] = []
        self.decrypted = 0

    def open(self, record: bytes) -> Frame | None:
        """Decrypt a record; return a frame if this is its last record, else None.

        Raises:
            ValueError: The server has violated the protocol.
            CutError: The record is not the next one that the server sent.

        """
        header = record[: HEADER.size]
        nonce = struct.pack(">IQ", 0, self._counter)
        try:
            piece = self._cipher.decrypt(nonce, record[HEADER.size :], header)
        except (InvalidTag, ValueError) as error:
            raise CutError("a record was altered") from error
        version, kind, flags, zero, step, micro_batch, acknowledged, counter, size = HEADER.unpack(
            header
        )
        if (version, zero, counter) != (VERSION, 0, self._counter) or flags not in (0, LAST):
            raise ValueError(f"this record is not due: {header.hex()}")
        self._pieces.append(piece)
        self._counter += 1
        self.decrypted += len(self._pieces[-1])
        if flags != LAST:
            return None
        payload = b"".join(self._pieces)
        self._pieces = []
        if len(payload) != size:
            raise ValueError(f"a payload has {len(payload)} bytes and not {size}")
        return Frame(Kind(kind), step, micro_batch, payload, acknowledged)


def write_payload(tensors: dict[str, torch.Tensor], fields: dict[str, Value]) -> bytes:
    """Return a payload; the library sorts tensors by element size, largest first, then by name."""
    texts = {name: json.dumps(value) for name, value in fields.items()}
    written = save({n: t.contiguous() for n, t in tensors.items()}, texts or None)
    (length,) = struct.unpack_from("<Q", written)
    description = written[8 : 8 + length].rstrip(b" ")
    description += b" " * (-(8 + len(description)) % 64)
    return struct.pack("<Q", len(description)) + description + written[8 + length :]


def read_payload(payload: bytes) -> tuple[dict[str, torch.Tensor], dict[str, Value]]:
    """Return a payload's tensors, copied to separate memory, and its fields."""
    (length,) = struct.unpack_from("<Q", payload)
    texts = json.loads(payload[8 : 8 + length]).get("__metadata__", {})
    tensors = {name: value.clone() for name, value in load(payload).items()}
    return tensors, {name: json.loads(text) for name, text in texts.items()}


def to_wire(wire: str, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return hidden states or a gradient in the wire type."""
    if wire == "float32":
        return {name: tensor.float()}
    if wire == "bfloat16":
        return {name: tensor.bfloat16()}
    scale = (tensor.float().abs().amax(dim=2) / 127).clamp(min=2**-126)
    integers = (tensor.float() / scale[:, :, None]).round().clamp(-127, 127)
    return {name: integers.to(torch.int8), f"{name}.scale": scale}


def from_wire(wire: str, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the hidden states or gradient that the tensors encode."""
    if wire == "int8":
        return tensors[name].float() * tensors[f"{name}.scale"][:, :, None]
    return tensors[name]
