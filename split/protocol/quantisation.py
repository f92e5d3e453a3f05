"""Quantisation to int8 with one scale per token (``split.wire-dtype = "int8"``)."""

import torch
from torch import Tensor

from split.protocol.errors import FrameError

# 127 and -128 times this scale are finite.
_LARGEST_SCALE = torch.finfo(torch.float32).max / 128


def _check_scales(scales: Tensor, name: str) -> None:
    least, most = (float(bound) for bound in torch.aminmax(scales))
    if not 0 <= least <= most <= _LARGEST_SCALE:  # NaN is within no bounds
        raise FrameError(f"{name!r} contains NaN, infinity or a number that is too large")


def quantise(tensor: Tensor, integers: Tensor, scales: Tensor, name: str) -> None:
    """Round each token's numbers to multiples of their largest absolute value divided by 127.

    Read ``tensor``, (rows, columns, hidden); write ``integers``, int8 of the same shape, and
    ``scales``, float32 of shape (rows, columns). ``name`` is for error messages.
    """
    numbers = tensor.float()
    # Along a dimension, aminmax is many times slower than amax and amin.
    largest = torch.maximum(numbers.amax(-1), -numbers.amin(-1))
    # Avoid a division by 0 if all numbers of a token are 0 or close to the smallest float32.
    scale = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    scales.copy_(scale)
    _check_scales(scales, name)
    integers.copy_((numbers / scale.unsqueeze(-1)).round_().clamp_(-127, 127))


def dequantise(integers: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return float32 numbers of shape (rows, columns, hidden)."""
    _check_scales(scales, name)
    return integers.float().mul_(scales.unsqueeze(-1))  # multiplying mixed types is slow
