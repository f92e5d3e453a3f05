"""Frames as bytes and back: the safetensors format, and nothing that could run code.

Written and read here without the safetensors library, because a hidden state should be copied once
on its way out (converted straight into the buffer that is encrypted) and not at all on its way in,
and because a description has to be judged before its data are there. Tests hold it to the library.
"""

import math

import torch
from torch import Tensor

from split.protocol.description import SCALE, Description, check, check_fields, describe
from split.protocol.errors import FrameError
from split.protocol.frames import TENSOR_OF_KIND, Frame, Kind, Limits, check_padding

# So that 127 and -128 times a scale are still finite.
_LARGEST_SCALE = torch.finfo(torch.float32).max / 128


class Outgoing:
    """A frame on its way out: described and checked at once, written later in another thread.

    Args:
        frame: its tensors must not change until it is written.
        limits: of the lane.

    Raises:
        FrameError: the frame is not one that the lane allows.

    """

    def __init__(self, frame: Frame, limits: Limits) -> None:
        if not (0 <= frame.step < 2**32 and 0 <= frame.micro_batch < 2**32):
            raise FrameError("step and micro-batch are numbers below 2³²")
        check_fields(frame.fields)
        self._text, self._description = describe(frame, limits)
        check(self._description, frame.kind, limits)
        check_padding(frame)
        self.frame = frame

    @property
    def size(self) -> int:
        """The payload in bytes."""
        return self._description.size

    def write(self) -> memoryview:
        """Convert and copy the tensors into one buffer.

        Raises:
            FrameError: a tensor has a number that is not finite.

        """
        buffer = torch.empty(self.size, dtype=torch.uint8)
        content = buffer.numpy().data
        start = self._description.start
        content[:start] = self._text
        places = {entry.name: entry.of(buffer[start:]) for entry in self._description.entries}
        tokens = TENSOR_OF_KIND.get(self.frame.kind)
        for name, tensor in self.frame.tensors.items():
            if name == tokens and places[name].dtype is torch.int8:
                _quantise(tensor.detach(), places[name], places[name + SCALE], name)
            else:
                places[name].copy_(tensor.detach())
                _check_finite(places[name], name)
        return content


def read(
    description: Description, buffer: Tensor, kind: Kind, step: int, micro_batch: int
) -> Frame:
    """Make the frame of a whole payload; its tensors are views of the payload where they can be.

    Args:
        description: of this payload.
        buffer: the payload, bytes of shape (size,).
        kind: of the frame.
        step: of the frame.
        micro_batch: of the frame.

    Raises:
        FrameError: a tensor has a number that is not finite, or lengths don't fit.

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
        # The minimum and maximum are NaN if any element is: one pass, without a mask.
        least, most = (float(bound) for bound in torch.aminmax(tensor))
        if not (math.isfinite(least) and math.isfinite(most)):
            raise FrameError(f"{name!r} has NaN or infinite numbers")


def _check_scales(scales: Tensor, name: str) -> None:
    least, most = (float(bound) for bound in torch.aminmax(scales))
    if not 0 <= least <= most <= _LARGEST_SCALE:  # NaN is within no bounds
        raise FrameError(f"{name!r} has NaN, infinite or too large numbers")


def _quantise(tensor: Tensor, integers: Tensor, scales: Tensor, name: str) -> None:
    """Round each token's numbers to a 127th of the largest of them.

    Args:
        tensor: (rows, columns, hidden).
        integers: written to, int8 of the same shape.
        scales: written to, float32 of shape (rows, columns).
        name: for the error.

    """
    numbers = tensor.float()
    # Along a dimension, aminmax is many times slower than the two of them.
    largest = torch.maximum(numbers.amax(-1), -numbers.amin(-1))
    # A token of zeros, or of numbers near float32's smallest, has no scale to divide by.
    scale = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    scales.copy_(scale)
    _check_scales(scales, name)
    integers.copy_((numbers / scale.unsqueeze(-1)).round_().clamp_(-127, 127))


def _dequantise(integers: Tensor, scales: Tensor, name: str) -> Tensor:
    """Give float32 numbers of shape (rows, columns, hidden)."""
    _check_scales(scales, name)
    return integers.float().mul_(scales.unsqueeze(-1))  # mixed types in one step are slow
