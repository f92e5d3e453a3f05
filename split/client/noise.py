"""Gaussian noise on the hidden states that a client sends (``split.noise`` in the policy)."""

import os

import torch

from finetuning.devices import to_device
from finetuning.randomness import normal


def add_noise(hidden: torch.Tensor, noise: float) -> torch.Tensor:
    """Add noise, drawn with ``os.urandom``, to hidden states of shape (rows, columns, hidden).

    ``noise`` is the standard deviation relative to the root mean square of each token's state.
    """
    deviation = noise * hidden.float().square().mean(-1, keepdim=True).sqrt()
    # Don't derive the noise from the run's seed, which the server knows too.
    drawn = normal(hidden.numel(), os.urandom).view_as(hidden).to(deviation.dtype)
    return hidden + (deviation * to_device(drawn, hidden.device)).to(hidden.dtype)
