"""Gradients with differential privacy for single rows (DP-SGD, algorithm 1 of Abadi et al., 2016).

A step samples each row independently, clips the gradient of each row's loss, and adds Gaussian
noise to the sum of the gradients. The random numbers must be secret, because anyone who can
reproduce them can subtract the noise. Therefore they don't come from the run's seed, which the
coordinator knows.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from finetuning.data.batching import MicroBatch, split_rows
from finetuning.devices import to_device
from finetuning.randomness import RandomBytes, normal, uniform
from finetuning.whole_model import WholeModel

# Memory limit for the gradients of rows computed together; a single row may exceed it.
ROW_GRADIENT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Noise:
    """The parameters of the noise in private training steps."""

    multiplier: float  # σ, the standard deviation of the noise as a multiple of C
    row_norm: float  # C, the maximum norm of a row's gradient over all adapter weights
    expected_rows: float  # expected number of rows in a step


class PrivateGradients:
    """A `TrainableModel` that computes private gradients of a whole model.

    If the gradients of a micro-batch's rows exceed ``max_bytes``, the rows are processed in groups.
    ``source`` returns the source of a step's noise, given the step's seed, which isn't secret.
    """

    def __init__(
        self,
        model: WholeModel,
        parameters: Mapping[str, torch.nn.Parameter],
        noise: Noise,
        source: Callable[[int], RandomBytes] = lambda _: os.urandom,
        max_bytes: int = ROW_GRADIENT_BYTES,
    ) -> None:
        self._model = model
        self._parameters = parameters
        self._noise = noise
        self._source = source
        of_a_row = sum(p.numel() * p.element_size() for p in parameters.values())
        self._rows_at_once = max(1, max_bytes // of_a_row)
        self.columns_before, self.clip = model.columns_before, model.clip

    @torch.no_grad()
    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Set the adapter's ``.grad`` to the private gradient: (Σ clipped + noise) / expected rows.

        ``batches`` may be empty. Return each micro-batch's summed loss in nats, which is not
        differentially private.
        """
        noise, random_bytes = self._noise, self._source(seed)
        deviation = noise.multiplier * noise.row_norm
        sums = {
            name: to_device(
                deviation * normal(p.numel(), random_bytes).view_as(p), p.device, p.dtype
            )
            for name, p in self._parameters.items()
        }
        losses = []
        for batch in batches:
            parts = []
            for rows in split_rows(batch, self._rows_at_once):
                with torch.enable_grad():
                    gradients, loss = self._model.row_gradients(rows)
                for name, clipped in clipped_sums(gradients, noise.row_norm).items():
                    sums[name].add_(clipped)
                parts.append(loss)
            losses.append(torch.stack(parts).sum())
        for name, parameter in self._parameters.items():
            parameter.grad = sums[name] / noise.expected_rows
        # A loss that isn't finite must not end the round, because other parties would notice that.
        values = torch.stack(losses).tolist() if losses else []
        return [loss if math.isfinite(loss) else 0.0 for loss in values]


def clipped_sums(gradients: Mapping[str, torch.Tensor], row_norm: float) -> dict[str, torch.Tensor]:
    """Clip each row's gradient to ``row_norm``, and sum the gradients, (rows, …) each, over rows.

    A row's norm includes all weights. A row whose gradient is not finite counts as 0.
    """
    first = next(iter(gradients.values()))
    squares = sum(
        torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=torch.float64).square().to(first.device)
        for g in gradients.values()
    )
    norms = torch.as_tensor(squares).sqrt()
    finite = norms.isfinite()
    scales = torch.where(finite, (row_norm / norms).clamp(max=1), 0)
    return {
        name: torch.einsum(
            "r,r...->...",
            scales.to(g),
            g.where(finite.to(g.device).view(-1, *[1] * (g.ndim - 1)), 0),
        )
        for name, g in gradients.items()
    }


def poisson_steps(
    count: int, rate: float, steps: int, random_bytes: RandomBytes = os.urandom
) -> list[list[int]]:
    """Draw the rows of each step: each of ``count`` rows independently, with probability ``rate``.

    A step may have no rows.
    """
    return [
        (uniform(count, random_bytes) < rate).nonzero().flatten().tolist() for _ in range(steps)
    ]
