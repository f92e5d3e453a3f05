"""FedProx's proximal term (Li et al., MLSys 2020, equation 2)."""

import torch
from torch.nn.utils import get_total_norm

from finetuning.training.penalty import Penalty


class ProximalPenalty(Penalty):
    """μ/2 · ‖W − Ŵ‖², whose gradient μ·(W − Ŵ) is added to the loss's gradient."""

    @torch.no_grad()
    def distance(self) -> float:
        """Return ‖W − Ŵ‖."""
        return float(get_total_norm(self._changes()))

    def value(self) -> float:
        """Return μ/2 · ‖W − Ŵ‖²."""
        return self.weight / 2 * self.distance() ** 2

    def _gradients(self) -> list[torch.Tensor]:
        return [self.weight * change for change in self._changes()]
