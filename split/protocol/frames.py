"""The frames of a lane: their kinds, limits and checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import torch
from torch import Tensor

from split.protocol.errors import FrameError, ProtocolError

WireType = Literal["float32", "bfloat16", "int8"]
Value = str | int | float | bool

SMALL_PAYLOAD_BYTES = 2**16
SCALE = ".scale"
METADATA = "__metadata__"  # key of a frame's fields in safetensors
WIRE: dict[WireType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
PLAIN = {torch.float64, torch.float32, torch.int64, torch.int32}
_MAX_NAME_LENGTH = 256
_MAX_TEXT_LENGTH = 4096
# Hidden states of some models reach 10⁶. The square of 2³⁰ is far below float32's maximum.
_MAX_NUMBER = 2.0**30
# Memory overhead of Python and PyTorch for a queued frame, and for each of its tensors and fields:
# the measured values plus 20%.
_FRAME_BYTES = 640
_TENSOR_BYTES = 1024
_FIELD_BYTES = 160


class Kind(IntEnum):
    """The kind of a frame, one byte on the network; see the table in ``docs/wire.md``."""

    JOIN = 1
    WELCOME = 2
    HIDDEN = 3
    GRADIENT = 4
    STEP = 5
    AVERAGE = 6
    END = 7
    ERROR = 8  # last frame of a side that ends the lane with an error; field "message"
    CLOSE = 9  # last frame of a side that closes the lane normally
    CONFIRM = 10  # the first frame of a stream, in both directions


TENSOR_OF_KIND = {Kind.HIDDEN: "hidden", Kind.GRADIENT: "gradient"}


@dataclass(frozen=True)
class Frame:
    """One message of a lane.

    Received tensors are on the CPU. ``hidden`` and ``gradient`` have shape (rows, columns, hidden);
    ``lengths``, if present, has shape (rows,).
    """

    kind: Kind
    step: int = 0  # index of the optimizer step, below 2³²
    micro_batch: int = 0  # index of the micro-batch within the step, below 2³²
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fields: dict[str, Value] = field(default_factory=dict)

    def memory_bytes(self, payload: int) -> int:
        """Return the frame's maximum memory in bytes; ``payload`` is its size on the network."""
        # Hidden states may have types of different sizes in memory and on the network.
        content = max(payload, sum(tensor.nbytes for tensor in self.tensors.values()))
        overhead = _TENSOR_BYTES * len(self.tensors) + _FIELD_BYTES * len(self.fields)
        return content + _FRAME_BYTES + overhead

    def __repr__(self) -> str:
        """Describe the contents of the frame without values."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        return (
            f"Frame({self.kind.name}, step={self.step}, micro_batch={self.micro_batch}, "
            f"tensors={shapes}, fields={list(self.fields)})"
        )


@dataclass(frozen=True)
class Padding:
    """The padding of a micro-batch, which is sent instead of a mask.

    Padding on the right needs no mask, because causal attention ignores it. Generation pads on the
    left.
    """

    side: Literal["right", "left"]
    lengths: torch.Tensor  # (rows,) int64, number of tokens of each row without padding


@dataclass(frozen=True)
class Limits:
    """Limits on the frames of a lane, which both sides know before it is opened.

    The limit on the payload of ``HIDDEN`` and ``GRADIENT`` follows from ``max_tokens``; that of
    the other kinds except ``AVERAGE`` is 64 KiB. The columns of ``HIDDEN`` and ``GRADIENT`` are
    limited, too, because attention's time and memory grow with their square.
    """

    hidden: int  # width of the hidden states
    wire_dtype: WireType  # type of hidden states and gradients, in both directions
    max_tokens: int  # maximum rows × columns of a ``HIDDEN`` or ``GRADIENT`` frame
    average_bytes: int = 0  # maximum payload of ``AVERAGE`` frames; 0 allows none
    window: int = 4  # maximum number of micro-batches in flight
    max_columns: int | None = None  # None means ``max_tokens``

    @property
    def queue_bytes(self) -> int:
        """Maximum memory for frames to the other side that are unsent or not acknowledged.

        A micro-batch has one answer in each of its two passes. A client that reads its frames has
        acknowledged all answers except those of ``window`` micro-batches.
        """
        answers = 2 * (self.window + 1) * self.hidden_bytes
        return answers + max(self.average_bytes, 4 * SMALL_PAYLOAD_BYTES)

    @property
    def hidden_bytes(self) -> int:
        """Maximum memory of a ``HIDDEN`` or ``GRADIENT`` frame in bytes.

        Tensors count as float32, the largest type in memory and on the network.
        """
        length = 8  # bytes for a row's length; each row has at least one token
        return SMALL_PAYLOAD_BYTES + self.max_tokens * (4 * self.hidden + length)

    def max_payload_bytes(self, kind: Kind) -> int:
        """Return the maximum payload of a kind in bytes."""
        if kind in TENSOR_OF_KIND:
            scale = 4 if self.wire_dtype == "int8" else 0
            length = 4  # bytes for a row's length; each row has at least one token
            token = self.hidden * WIRE[self.wire_dtype].itemsize + scale + length
            return SMALL_PAYLOAD_BYTES + self.max_tokens * token
        return self.average_bytes if kind is Kind.AVERAGE else SMALL_PAYLOAD_BYTES

    def check_bytes(self, kind: Kind, size: int) -> None:
        """Raise a FrameError if a payload is larger than the lane allows for this kind."""
        max_bytes = self.max_payload_bytes(kind)
        if not max_bytes:
            raise FrameError(f"received {kind.name}, but adapters are not averaged within a round")
        if size > max_bytes:
            raise FrameError(
                f"a {kind.name} frame has {size} bytes; at most {max_bytes} were agreed on"
            )

    def check_shape(self, kind: Kind, shape: tuple[int, ...]) -> None:
        """Check the shape of a ``HIDDEN`` or ``GRADIENT`` frame's tensor.

        Raise a FrameError if the shape is not (rows, columns, hidden), or there are too many tokens
        or columns.
        """
        if len(shape) != 3 or shape[2] != self.hidden or 0 in shape:
            raise FrameError(
                f"a {kind.name} frame has shape {shape}; (rows, columns, {self.hidden}) was "
                "agreed on: do both sides have the same base model?"
            )
        if shape[0] * shape[1] > self.max_tokens:
            raise FrameError(
                f"a {kind.name} frame has {shape[0]} × {shape[1]} tokens; at most "
                f"{self.max_tokens} were agreed on"
            )
        if self.max_columns is not None and shape[1] > self.max_columns:
            raise FrameError(
                f"a {kind.name} frame has rows of {shape[1]} tokens; at most "
                f"{self.max_columns} were agreed on (data.max-length, or --max-prompt-length "
                "of chambers serve)"
            )

    def check(
        self, kind: Kind, size: int, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        """Check the size of a payload, and the types and shapes of its tensors by name.

        Raise a FrameError if the payload is not allowed for this kind.
        """
        self.check_bytes(kind, size)
        tokens = TENSOR_OF_KIND.get(kind)
        if tokens is None:
            for name, (dtype, _) in tensors.items():
                if dtype not in PLAIN:
                    raise FrameError(f"{name!r} of a {kind.name} frame can't be {dtype}")
            return
        wire = WIRE[self.wire_dtype]
        needed = {tokens, tokens + SCALE} if wire is torch.int8 else {tokens}
        if tensors.keys() - {"lengths"} != needed:
            raise FrameError(
                f"{kind.name} has tensors {sorted(tensors)}; expected {sorted(needed)}"
            )
        dtype, shape = tensors[tokens]
        if dtype is not wire:
            raise FrameError(
                f"received {tokens!r} as {dtype}; {self.wire_dtype} was agreed on: do both sides "
                "have the same split.wire-dtype?"
            )
        self.check_shape(kind, shape)
        expected = {tokens + SCALE: (torch.float32, shape[:2]), "lengths": (torch.int32, shape[:1])}
        for name, (dtype, shape) in expected.items():
            if name in tensors and tensors[name] != (dtype, shape):
                raise FrameError(f"{name!r} of a {kind.name} frame is not {dtype} of shape {shape}")


def average_bytes(weights: int) -> int:
    """Return the maximum payload of an ``AVERAGE`` frame with this number of float32 weights."""
    # Twice the size of the weights, to leave space for names and shapes.
    return 8 * weights + SMALL_PAYLOAD_BYTES


def check_padding(frame: Frame) -> None:
    """Check the row lengths and the side of the padding if a frame contains lengths.

    Raise a FrameError if a length is not between 1 and the number of columns, or the side is not
    left or right.
    """
    lengths = frame.tensors.get("lengths")
    if frame.kind not in TENSOR_OF_KIND or lengths is None:
        return
    rows, columns = frame.tensors[TENSOR_OF_KIND[frame.kind]].shape[:2]
    if lengths.shape != (rows,) or lengths.is_floating_point() or lengths.dtype is torch.bool:
        raise FrameError(f"lengths of {rows} rows can't be {lengths.dtype} {tuple(lengths.shape)}")
    low, high = (int(bound) for bound in torch.aminmax(lengths))
    if not 1 <= low <= high <= columns:
        raise FrameError(f"row lengths are {low} to {high}; expected 1 to {columns}")
    if frame.fields.get("side") not in ("left", "right"):
        raise FrameError('a frame with lengths needs a field "side" that is "left" or "right"')


def check_name(name: str) -> None:
    """Raise a FrameError unless a name has 1 to 256 characters and is not reserved."""
    if not 1 <= len(name) <= _MAX_NAME_LENGTH or name == METADATA:
        raise FrameError(
            f"a name in a frame must have 1 to {_MAX_NAME_LENGTH} characters and not be {METADATA}"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raise a FrameError unless fields are short strings, booleans, finite floats or int64."""
    for name, value in fields.items():
        check_name(name)
        match value:
            case bool():
                fits = True
            case str():
                fits = len(value) <= _MAX_TEXT_LENGTH
            case int():
                fits = -(2**63) <= value < 2**63
            case float():
                fits = math.isfinite(value)
            case _:
                fits = False
        if not fits:
            raise FrameError(f"field {name!r} ({type(value).__name__}) is invalid or too large")


def read_hidden(frame: Frame) -> tuple[torch.Tensor, Padding]:
    """Return hidden states and their padding. The lane has already checked shapes and lengths.

    Raise a ProtocolError if the lengths are missing, or a hidden state is too large.
    """
    if "lengths" not in frame.tensors:
        raise ProtocolError("received hidden states without the lengths of their rows")
    check_size(frame.tensors["hidden"], "hidden")
    side: Literal["left", "right"] = "left" if frame.fields.get("side") == "left" else "right"
    return frame.tensors["hidden"], Padding(side, frame.tensors["lengths"].long())


def check_size(numbers: torch.Tensor, name: str) -> None:
    """Reject numbers that could overflow in computations with other clients' numbers.

    Raise a ProtocolError if a number is not finite, or its absolute value is larger than 2³⁰.
    """
    if not numbers.numel():
        return
    low, high = (float(bound) for bound in torch.aminmax(numbers))
    if not -_MAX_NUMBER <= low <= high <= _MAX_NUMBER:
        raise ProtocolError(f"{name!r} contains NaN or numbers beyond 2³⁰")


def read_whole_number(frame: Frame, name: str) -> int:
    """Return the value of a field; raise a ProtocolError unless it is a non-negative integer."""
    value = frame.fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProtocolError(f"{frame.kind.name} has {name} = {value!r}; expected a whole number")
    return value
