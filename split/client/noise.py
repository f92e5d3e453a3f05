"""Gaussian noise on the hidden states that leave a client (``split.noise`` in its policy)."""

import os

import torch

from finetuning.randomness import normal


def add_noise(hidden: torch.Tensor, noise: float) -> torch.Tensor:
    """Return hidden states with noise, which nobody can repeat.

    Args:
        hidden: (rows, columns, hidden).
        noise: Standard deviation relative to the root mean square of each token's numbers.

    """
    deviation = noise * hidden.float().square().mean(-1, keepdim=True).sqrt()
    # Not from a seed, which the server knows too.
    drawn = normal(hidden.numel(), os.urandom).view_as(hidden).to(deviation)
    return hidden + (deviation * drawn).to(hidden)
