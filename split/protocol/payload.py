"""Serialisation of frames in the safetensors format, which cannot contain code.

With ``split.wire-dtype = "int8"``, hidden states and gradients have one scale per token.

This module does not use the safetensors library, for two reasons. Outgoing hidden states are copied
only once, directly into the buffer that is encrypted, and received tensors (unless int8) are views
of the decrypted payload. The header (here called description) is validated before the tensors' data
arrive and before memory is allocated for them. Tests compare this implementation with the library.
"""

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from finetuning.devices import to_host
from split.protocol.errors import FrameError
from split.protocol.frames import (
    METADATA,
    PLAIN,
    SCALE,
    TENSOR_OF_KIND,
    WIRE,
    Frame,
    Kind,
    Limits,
    Value,
    check_fields,
    check_name,
    check_padding,
)

MAX_DESCRIPTION_BYTES = 2**20 - 8  # the description must fit in a frame's first record
_MAX_DIMENSIONS = 8
_ALIGNED = 64
_LENGTH = struct.Struct("<Q")
_TORCH_TYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
}
# 127 and -128 times this scale are finite.
_MAX_SCALE = torch.finfo(torch.float32).max / 128
_NAMES = {dtype: name for name, dtype in _TORCH_TYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Position of a tensor in the data after the description."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    def of(self, data: Tensor) -> Tensor:
        """Return the tensor as a view of the data."""
        return data[self.begin : self.end].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Description:
    """Description of a payload, which precedes the data of the tensors."""

    start: int  # offset in bytes of the first tensor's data
    entries: tuple[Entry, ...]  # entries in the order of their data
    fields: dict[str, Value]

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor, keyed by name."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}

    @property
    def size(self) -> int:
        """Size of the whole payload in bytes."""
        return self.start + (self.entries[-1].end if self.entries else 0)


def describe(frame: Frame, limits: Limits) -> tuple[bytes, Description]:
    """Return a frame's description. Tensors are sorted by element size, so that all are aligned."""
    wanted: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    for name, tensor in frame.tensors.items():
        shape = tuple(tensor.shape)
        dtype = tensor.dtype
        if name == TENSOR_OF_KIND.get(frame.kind):
            limits.check_shape(frame.kind, shape)
            if not tensor.is_floating_point():
                raise FrameError(f"{name!r} must be floating-point, not {dtype}")
            dtype = WIRE[limits.wire_dtype]
            if dtype is torch.int8:
                wanted.append((name + SCALE, torch.float32, shape[:-1]))
        elif name == "lengths" and frame.kind in TENSOR_OF_KIND:
            dtype = torch.int32
        elif dtype not in PLAIN:
            raise FrameError(f"{name!r} can't be sent as {dtype}")
        check_name(name)
        wanted.append((name, dtype, shape))
    entries = []
    begin = 0
    for name, dtype, shape in sorted(wanted, key=lambda item: (-item[1].itemsize, item[0])):
        end = begin + math.prod(shape) * dtype.itemsize
        entries.append(Entry(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
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
        content[METADATA] = {name: json.dumps(value) for name, value in frame.fields.items()}
    text = json.dumps(content, separators=(",", ":")).encode()
    # The rounding of matrix products depends on the alignment of the operands. Padding makes the
    # alignment independent of the fields, so a frame that is sent again yields equal results.
    text += b" " * (-(len(text) + _LENGTH.size) % (_ALIGNED if entries else 8))
    if len(text) > MAX_DESCRIPTION_BYTES:
        raise FrameError(f"a frame with {len(entries)} tensors has too long a description")
    text = _LENGTH.pack(len(text)) + text
    return text, Description(len(text), tuple(entries), frame.fields)


def read_description(content: memoryview, size: int, kind: Kind, limits: Limits) -> Description:
    """Parse and check the description at the beginning of a payload of ``size`` bytes.

    ``content`` is the part of the payload that has arrived. Raise a FrameError if the payload is
    not in safetensors format, or not allowed on the lane.
    """
    if len(content) < _LENGTH.size:
        raise FrameError("a payload is too short to be safetensors")
    (length,) = _LENGTH.unpack_from(content)
    start = _LENGTH.size + length
    if length > MAX_DESCRIPTION_BYTES or start > len(content) or start % 8:
        raise FrameError("a payload's description has an invalid length")
    try:
        parsed = json.loads(
            bytes(content[_LENGTH.size : start]).decode(),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
        )
        fields = {name: json.loads(text) for name, text in parsed.pop(METADATA, {}).items()}
        entries = sorted((_entry(*item) for item in parsed.items()), key=lambda entry: entry.begin)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        # Don't chain the cause, because it contains text of the payload.
        raise FrameError("a payload's description is malformed") from None
    check_fields(fields)
    description = Description(start, tuple(entries), fields)
    end = 0
    for entry in entries:
        if entry.begin != end or entry.begin % entry.dtype.itemsize:
            raise FrameError("a payload's tensors overlap, leave gaps or are not aligned")
        end = entry.end
    if description.size != size:
        raise FrameError(f"a payload of {size} bytes is described as {description.size} bytes long")
    limits.check(kind, size, description.tensors)
    return description


def _entry(name: str, item: Mapping[str, Any]) -> Entry:
    """Parse the description of a tensor. Any exception means that the description is malformed."""
    check_name(name)
    if item.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError
    shape, (begin, end) = item["shape"], item["data_offsets"]
    numbers = [*shape, begin, end]
    if len(shape) > _MAX_DIMENSIONS or any(
        type(n) is not int or not 0 <= n < 2**62 for n in numbers
    ):
        raise ValueError
    dtype = _TORCH_TYPES[item["dtype"]]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError
    return Entry(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError
    return dict(pairs)


def _no_constant(_: str) -> None:
    raise ValueError  # JSON has no NaN, but Python's parser accepts it


class Outgoing:
    """An outgoing frame, which is checked on creation and serialised later in another thread.

    Tensors on an accelerator are copied to the CPU as soon as the accelerator has computed them, in
    the order of its queue. Tensors on the CPU must not change until the frame is acknowledged. A
    FrameError is raised if the frame is not allowed on the lane.
    """

    def __init__(self, frame: Frame, limits: Limits) -> None:
        if not (0 <= frame.step < 2**32 and 0 <= frame.micro_batch < 2**32):
            raise FrameError("step and micro-batch must be from 0 to 2³² - 1")
        check_fields(frame.fields)
        self._text, self._description = describe(frame, limits)
        limits.check(frame.kind, self.size, self._description.tensors)
        check_padding(frame)
        # Convert to the wire type on the accelerator, before copying.
        types = {entry.name: entry.dtype for entry in self._description.entries}
        on_device = {n: t for n, t in frame.tensors.items() if t.device.type != "cpu"}
        for name, tensor in on_device.items():
            if types[name] is not torch.int8:
                on_device[name] = tensor.detach().to(types[name])
        copies, self._copied = to_host(on_device)
        self.frame = replace(frame, tensors=frame.tensors | copies)

    @property
    def size(self) -> int:
        """Size of the payload in bytes."""
        return self._description.size

    @property
    def kept_bytes(self) -> int:
        """Memory that the frame occupies until it is acknowledged."""
        return self.frame.memory_bytes(self.size)

    def write(self) -> memoryview:
        """Return the payload: convert and copy the tensors into one buffer.

        Raise a FrameError if a tensor contains a value that is not finite.
        """
        for copied in self._copied:
            copied.synchronize()
        buffer = torch.empty(self.size, dtype=torch.uint8)
        content = buffer.numpy().data
        start = self._description.start
        content[:start] = self._text
        views = {entry.name: entry.of(buffer[start:]) for entry in self._description.entries}
        tokens = TENSOR_OF_KIND.get(self.frame.kind)
        for name, tensor in self.frame.tensors.items():
            if name == tokens and views[name].dtype is torch.int8:
                _quantise(tensor.detach(), views[name], views[name + SCALE], name)
            else:
                views[name].copy_(tensor.detach())
                _check_finite(views[name], name)
        return content


def read(
    description: Description, buffer: Tensor, kind: Kind, step: int, micro_batch: int
) -> Frame:
    """Return the frame in ``buffer``, a complete payload: uint8 of shape (size,).

    The frame's tensors are views of ``buffer``, except tensors that were int8. Raise a FrameError
    if a tensor contains a value that is not finite, or the row lengths are invalid.
    """
    data = buffer[description.start :]
    tensors = {entry.name: entry.of(data) for entry in description.entries}
    for name, tensor in tensors.items():
        _check_finite(tensor, name)
    tokens = TENSOR_OF_KIND.get(kind)
    if tokens is not None and tensors[tokens].dtype is torch.int8:
        tensors[tokens] = _dequantise(tensors[tokens], tensors.pop(tokens + SCALE), tokens)
    frame = Frame(kind, step, micro_batch, tensors, description.fields)
    check_padding(frame)
    return frame


def _check_finite(tensor: Tensor, name: str) -> None:
    if tensor.is_floating_point() and tensor.numel():
        # Minimum and maximum are NaN if any element is NaN; aminmax needs one pass and no mask.
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise FrameError(f"{name!r} contains NaN or infinity")


def _check_scales(scales: Tensor, name: str) -> None:
    low, high = (float(bound) for bound in torch.aminmax(scales))
    if not 0 <= low <= high <= _MAX_SCALE:  # NaN is within no bounds
        raise FrameError(f"{name!r} contains NaN, infinity or a number that is too large")


def _quantise(tensor: Tensor, integers: Tensor, scales: Tensor, name: str) -> None:
    """Round each token's numbers to multiples of their largest absolute value divided by 127.

    Read ``tensor``, (rows, columns, hidden); write ``integers``, int8 of the same shape, and
    ``scales``, float32 of shape (rows, columns). ``name`` is for error messages.
    """
    numbers = tensor.float()
    # Along a dimension, aminmax is many times slower than amax and amin.
    max_size = torch.maximum(numbers.amax(-1), -numbers.amin(-1))
    # Avoid a division by 0 if all numbers of a token are 0 or close to the smallest float32.
    scale = (max_size / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    scales.copy_(scale)
    _check_scales(scales, name)
    integers.copy_((numbers / scale.unsqueeze(-1)).round_().clamp_(-127, 127))


def _dequantise(integers: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return float32 numbers of shape (rows, columns, hidden)."""
    _check_scales(scales, name)
    return integers.float().mul_(scales.unsqueeze(-1))  # multiplying mixed types is slow
