"""FedProx's proximal term (Li et al., MLSys 2020, equation 2).

With Ŵ the global adapter just received, local training adds μ/2 · ‖W − Ŵ‖² over all adapter weights
W to its loss.
"""

import math
from collections.abc import Mapping

import torch

from finetuning.training.penalty import add_gradients


class ProximalPenalty:
    """μ/2 · ‖W − Ŵ‖², whose gradient μ·(W − Ŵ) is added to that of the loss.

    Args:
        parameters: Trained weights W by name.
        anchor: Ŵ by name; copied.
        weight: μ.

    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        anchor: Mapping[str, torch.Tensor],
        weight: float,
    ) -> None:
        self.weight = weight
        self._terms = [
            (parameter, anchor[name].detach().to(parameter, copy=True))
            for name, parameter in parameters.items()
        ]

    @torch.no_grad()
    def distance(self) -> float:
        """Return ‖W − Ŵ‖."""
        return math.sqrt(sum(float((w - anchor).square().sum()) for w, anchor in self._terms))

    def value(self) -> float:
        """Return μ/2 · ‖W − Ŵ‖²."""
        return self.weight / 2 * self.distance() ** 2

    @torch.no_grad()
    def add_gradient(self) -> float:
        """Add μ·(W − Ŵ) to every parameter's ``.grad``; return its share of the gradient norm."""
        return add_gradients((w, self.weight * (w - anchor)) for w, anchor in self._terms)
