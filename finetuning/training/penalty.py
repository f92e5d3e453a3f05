"""A penalty that is added to the loss of local training, and depends only on the weights."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.utils import get_total_norm


class Penalty(ABC):
    """A penalty on the difference between the trained weights and the global weights.

    Args:
        parameters: Trained weights W by name.
        anchor: The weights Ŵ of the global adapter just received, keyed by name; copied.
        weight: The factor λ or μ.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        anchor: Mapping[str, torch.Tensor],
        weight: float,
    ) -> None:
        self.weight = weight
        self._parameters = list(parameters.values())
        self._anchors = [anchor[name].detach().to(w, copy=True) for name, w in parameters.items()]

    @abstractmethod
    def value(self) -> float:
        """Return the penalty."""

    @abstractmethod
    def _gradients(self) -> Sequence[torch.Tensor]:
        """Return the penalty's gradient for each parameter."""

    @torch.no_grad()
    def add_gradient(self) -> float:
        """Add the penalty's gradient to each ``.grad``; return its share of the total norm.

        The share is |penalty's gradient| ÷ (|penalty's gradient| + |loss's gradient|).
        """
        gradients = self._gradients()
        norms = [get_total_norm(gradients), self._norm_of_loss()]
        of_penalty, of_loss = torch.stack(norms).tolist()
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad += gradient
        return float(of_penalty / (of_penalty + of_loss)) if of_penalty + of_loss else 0.0

    def _changes(self) -> Iterator[torch.Tensor]:
        """Yield W − Ŵ of each parameter."""
        return (w - anchor for w, anchor in zip(self._parameters, self._anchors, strict=True))

    def _norm_of_loss(self) -> torch.Tensor:
        """Return the norm of the loss's gradient."""
        return get_total_norm([w.grad for w in self._parameters if w.grad is not None])
