"""FedJudge's continual-learning penalty (Eq. 3 and 4, after Zhou et al., CVPR 2021).

Let Ŵ be the global adapter just received, J ≥ 0 the importance of its weights, and δ = W − Ŵ. Then
the paper's Jᵀ|δ| + |δ|ᵀJᵀJ|δ| is s + s² with s = Σ J·|δ| over all adapter weights.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch.nn.utils import get_total_norm

from finetuning.data.batching import MicroBatch
from finetuning.training.penalty import Penalty
from finetuning.whole_model import WholeModel

Sum = Literal["all", "tensor"]


def importance(model: WholeModel, rows: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Compute J at the adapter's current weights, those of the global adapter, as a mean over rows.

    ``rows`` are one or more training examples, each in its own micro-batch. J is the mean of
    |∂L/∂W| over rows, where L is the mean loss of a row's targets.
    """
    total: dict[str, torch.Tensor] = {}
    for row in rows:
        for name, gradient in model.gradients_of(row).items():
            value = gradient.abs()
            total[name] = total[name] + value if name in total else value
    return {name: value / len(rows) for name, value in total.items()}


def shuffle_importance(weights: Mapping[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return the importance with the values of each tensor in random order.

    Shuffled values are a control: the penalty has the same strength, but acts on random weights.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value.flatten()[torch.randperm(value.numel(), generator=generator)].view_as(value)
        for name, value in sorted(weights.items())
    }


class ContinualPenalty(Penalty):
    """λ·(s + s²), whose gradient λ·(1 + 2s)·J·sign(W − Ŵ) is added to the loss's gradient.

    The gradient of |δ| at 0 is defined as 0, as in autograd.

    Args:
        parameters, anchor: See `Penalty`.
        importance: J by name.
        weight: λ. With 0, gradients are unchanged, bit for bit, but s can still be measured.
        share: Target share of the penalty in the gradient norm, below 1. λ is chosen in each step
            to reach this share; ``weight`` is then the last step's λ. With 0, λ is constant.
        over: ``all``: one s over all tensors. ``tensor``: one s per tensor; the tensors' s + s² are
            summed and halved, as in the code published with the paper.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        anchor: Mapping[str, torch.Tensor],
        importance: Mapping[str, torch.Tensor],
        weight: float,
        share: float = 0.0,
        over: Sum = "all",
    ) -> None:
        super().__init__(parameters, anchor, weight)
        self._share = share
        self._over = over
        self._factor = 1.0 if over == "all" else 0.5
        self._importance = [
            importance[name].detach().to(w, copy=True) for name, w in parameters.items()
        ]

    def distance(self) -> float:
        """Return s = Σ J·|W − Ŵ|."""
        return float(self._sums().sum())

    def value(self) -> float:
        """Return λ·(s + s²), or Σ λ·(s + s²)/2 over tensors."""
        s = self._sums()
        return self.weight * self._factor * float((s + s.square()).sum())

    def add_gradient(self) -> float:
        """Add the penalty's gradient, unless λ is always 0; return its share of the total norm."""
        return super().add_gradient() if self.weight or self._share else 0.0

    def _gradients(self) -> list[torch.Tensor]:
        slopes = (self._factor * (1 + 2 * self._sums())).expand(len(self._importance))
        gradients = [
            slope.to(j.device) * j * change.sign()
            for slope, j, change in zip(slopes, self._importance, self._changes(), strict=True)
        ]
        if self._share:
            pull, loss = torch.stack([get_total_norm(gradients), self._norm_of_loss()]).tolist()
            self.weight = self._share / (1 - self._share) * loss / pull if pull else 0.0
        return [self.weight * gradient for gradient in gradients]

    @torch.no_grad()
    def _sums(self) -> torch.Tensor:
        """Return s, (1,) or (tensors,) float64, on the first tensor's device."""
        pairs = zip(self._importance, self._changes(), strict=True)
        device = self._importance[0].device
        sums = torch.stack([(j * change.abs()).sum().to(device) for j, change in pairs]).double()
        return sums if self._over == "tensor" else sums.sum(0, keepdim=True)
