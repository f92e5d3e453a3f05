"""FedJudge's continual-learning penalty (Eq. 3 and 4, after Zhou et al., CVPR 2021).

With Ŵ the global adapter just received, J ≥ 0 the importance of its weights and δ = W − Ŵ,
the paper's Jᵀ|δ| + |δ|ᵀJᵀJ|δ| is s + s² with s = Σ J·|δ| over all adapter weights.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from finetuning.data.batching import MicroBatch
from finetuning.model.whole_model import WholeModel
from finetuning.training.penalty import add_gradients

Jacobian = Literal["mean-absolute", "mean-gradient"]


def importance(
    model: WholeModel, batches: Iterable[MicroBatch], jacobian: Jacobian
) -> dict[str, torch.Tensor]:
    """Compute J at the adapter's present weights.

    Args:
        model: Model with the global adapter loaded.
        batches: Training examples; at least one micro-batch.
        jacobian: ``mean-absolute`` averages |∂L/∂W| over micro-batches, ``mean-gradient`` takes
            the absolute value of the average.

    Returns:
        A float32 tensor of non-negative values for every trainable parameter, by name.

    """
    total: dict[str, torch.Tensor] = {}
    count = 0
    for batch in batches:
        for name, gradient in model.gradients_of(batch).items():
            value = gradient.abs() if jacobian == "mean-absolute" else gradient
            total[name] = total[name] + value if name in total else value
        count += 1
    return {name: (value / count).abs() for name, value in total.items()}


class ContinualPenalty:
    """λ·(s + s²), whose gradient is added to that of the loss.

    Args:
        parameters: Trained weights W by name.
        anchor: Ŵ by name; copied.
        importance: J by name.
        weight: λ; with 0 gradients stay unchanged, bit for bit, and s is still measured.

    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        anchor: Mapping[str, torch.Tensor],
        importance: Mapping[str, torch.Tensor],
        weight: float,
    ) -> None:
        self.weight = weight
        self._terms = [
            (
                parameter,
                anchor[name].detach().to(parameter, copy=True),
                importance[name].detach().to(parameter, copy=True),
            )
            for name, parameter in parameters.items()
        ]

    @torch.no_grad()
    def distance(self) -> float:
        """Return s = Σ J·|W − Ŵ|."""
        return float(sum((j * (w - anchor).abs()).sum() for w, anchor, j in self._terms))

    def value(self) -> float:
        """Return λ·(s + s²)."""
        s = self.distance()
        return self.weight * (s + s * s)

    @torch.no_grad()
    def add_gradient(self) -> float:
        """Add λ·(1 + 2s)·J·sign(W − Ŵ) to every ``.grad``; return its share of the gradient norm.

        The gradient of |δ| at 0 is taken as 0, as autograd does.
        """
        if self.weight == 0:
            return 0.0
        slope = self.weight * (1 + 2 * self.distance())
        return add_gradients((w, slope * j * (w - anchor).sign()) for w, anchor, j in self._terms)
