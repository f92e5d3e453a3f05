"""The front of a payload, by the safetensors format: its tensors' names, types, shapes and places.

It is judged before the data are there, and before anything is allocated for them.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from split.protocol.errors import FrameError
from split.protocol.frames import TENSOR_OF_KIND, Frame, Kind, Limits, Value

LONGEST_DESCRIPTION = 2**20 - 8  # it has to lie in a frame's first record
SCALE = ".scale"
_LONGEST_NAME = 256
_LONGEST_TEXT = 4096
_MOST_DIMENSIONS = 8
_ALIGNED = 64
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_TORCH_TYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}
_NAMES = {dtype: name for name, dtype in _TORCH_TYPES.items()}
_PLAIN = {torch.float64, torch.float32, torch.int64, torch.int32}
_WIRE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class Entry:
    """One tensor's place in the data that follow the description."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, data: Tensor) -> Tensor:
        """Give the tensor as a view of the data's bytes."""
        return data[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Description:
    """What a payload holds, known before its data are there.

    Attributes:
        start: offset of the first tensor's data, in bytes.
        entries: the tensors in the order of their data.
        fields: the frame's fields.

    """

    start: int
    entries: tuple[Entry, ...]
    fields: dict[str, Value]

    @property
    def size(self) -> int:
        """The whole payload in bytes."""
        return self.start + (self.entries[-1].end if self.entries else 0)


def describe(frame: Frame, limits: Limits) -> tuple[bytes, Description]:
    """Lay a frame's tensors out, those with the largest elements first so that all are aligned."""
    wanted: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for name, tensor in frame.tensors.items():
        shape = tuple(tensor.shape)
        dtype = tensor.dtype
        if name == TENSOR_OF_KIND.get(frame.kind):
            limits.check_shape(frame.kind, shape)
            if not tensor.is_floating_point():
                raise FrameError(f"{name!r} has {dtype}, not floating-point numbers")
            dtype = _WIRE[limits.wire_dtype]
            if dtype is torch.int8:
                wanted.append((name + SCALE, torch.float32, shape[:-1]))
        elif name == "lengths" and frame.kind in TENSOR_OF_KIND:
            dtype = torch.int32
        elif dtype not in _PLAIN:
            raise FrameError(f"{name!r} can't travel as {dtype}")
        _check_name(name)
        wanted.append((name, dtype, shape))
    entries = []
    begin = 0
    for name, dtype, shape in sorted(wanted, key=lambda item: (-item[1].itemsize, item[0])):
        end = begin + math.prod(shape) * dtype.itemsize
        entries.append(Entry(name, dtype, shape, begin, end))
        begin = end
    content: dict[str, Any] = {
        entry.name: {
            "dtype": _NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
        for entry in entries
    }
    if frame.fields:
        content[_METADATA] = {name: json.dumps(value) for name, value in frame.fields.items()}
    text = json.dumps(content, separators=(",", ":")).encode()
    # Products round differently by where their factors begin, which no number among the fields may
    # change: what is sent again after a cut would be computed otherwise.
    text += b" " * (-(len(text) + _LENGTH.size) % (_ALIGNED if entries else 8))
    if len(text) > LONGEST_DESCRIPTION:
        raise FrameError(f"a frame with {len(entries)} tensors has too long a description")
    text = _LENGTH.pack(len(text)) + text
    return text, Description(len(text), tuple(entries), frame.fields)


def read_description(content: memoryview, size: int, kind: Kind, limits: Limits) -> Description:
    """Parse and check the front of a payload.

    Args:
        content: as much of the payload as is there.
        size: length of the whole payload in bytes.
        kind: of the frame.
        limits: of the lane.

    Raises:
        FrameError: it is not safetensors, or not what the lane allows.

    """
    if len(content) < _LENGTH.size:
        raise FrameError("a payload is too short to be safetensors")
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    if length > LONGEST_DESCRIPTION or start > len(content) or start % 8:
        raise FrameError("a payload's description does not fit")
    try:
        parsed = json.loads(
            bytes(content[_LENGTH.size : start]).decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
        )
        fields = {name: json.loads(text) for name, text in parsed.pop(_METADATA, {}).items()}
        entries = sorted((_entry(*item) for item in parsed.items()), key=lambda entry: entry.begin)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Without the cause: it has the payload's text with it.
        raise FrameError("a payload's description is malformed") from None
    check_fields(fields)
    description = Description(start, tuple(entries), fields)
    end = 0
    for entry in entries:
        if entry.begin != end or entry.begin % entry.dtype.itemsize:
            raise FrameError("a payload's tensors overlap, leave gaps or are not aligned")
        end = entry.end
    if description.size != size:
        raise FrameError(f"a payload of {description.size} bytes came in {size}")
    check(description, kind, limits)
    return description


def check(description: Description, kind: Kind, limits: Limits) -> None:
    """Check a payload's size, names, types and shapes.

    Raises:
        FrameError: they are not what the lane allows for this kind.

    """
    if description.size > limits.largest(kind):
        raise FrameError(
            f"a {kind.name} frame has {description.size} bytes; agreed on are at most "
            f"{limits.largest(kind)}"
        )
    tokens = TENSOR_OF_KIND.get(kind)
    found = {entry.name: entry for entry in description.entries}
    if tokens is None:
        for entry in description.entries:
            if entry.dtype not in _PLAIN:
                raise FrameError(f"{entry.name!r} of a {kind.name} frame is {entry.dtype}")
        return
    wire = _WIRE[limits.wire_dtype]
    needed = {tokens, tokens + SCALE} if wire is torch.int8 else {tokens}
    if found.keys() - {"lengths"} != needed:
        raise FrameError(f"a {kind.name} frame has tensors {sorted(found)}")
    if found[tokens].dtype is not wire:
        raise FrameError(
            f"{tokens!r} came as {found[tokens].dtype}; agreed on is {limits.wire_dtype}: do both "
            "sides have the same split.wire-dtype?"
        )
    limits.check_shape(kind, found[tokens].shape)
    rows, columns = found[tokens].shape[:2]
    expected = {tokens + SCALE: (torch.float32, (rows, columns)), "lengths": (torch.int32, (rows,))}
    for name, (dtype, shape) in expected.items():
        if name in found and (found[name].dtype, found[name].shape) != (dtype, shape):
            raise FrameError(f"{name!r} of a {kind.name} frame is not {dtype} of shape {shape}")


def _entry(name: str, item: Mapping[str, Any]) -> Entry:
    """Parse one tensor's description; any exception means that it is malformed."""
    _check_name(name)
    if item.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError
    shape, (begin, end) = item["shape"], item["data_offsets"]
    numbers = [*shape, begin, end]
    if len(shape) > _MOST_DIMENSIONS or any(
        type(n) is not int or not 0 <= n < 2**62 for n in numbers
    ):
        raise ValueError
    dtype = _TORCH_TYPES[item["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError
    return Entry(name, dtype, tuple(shape), begin, end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError
    return dict(pairs)


def _no_constant(_: str) -> None:
    raise ValueError  # JSON has no NaN, but Python's reader does


def _check_name(name: str) -> None:
    if not 1 <= len(name) <= _LONGEST_NAME or name == _METADATA:
        raise FrameError(
            f"a name in a frame has 1 to {_LONGEST_NAME} characters, and isn't {_METADATA}"
        )


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check names and values: text, truth values, finite numbers, whole numbers of 64 bits."""
    for name, value in fields.items():
        _check_name(name)
        match value:
            case bool():
                fits = True
            case str():
                fits = len(value) <= _LONGEST_TEXT
            case int():
                fits = -(2**63) <= value < 2**63
            case float():
                fits = math.isfinite(value)
            case _:
                fits = False
        if not fits:
            raise FrameError(f"field {name!r} is too long, not finite, or a {type(value).__name__}")
