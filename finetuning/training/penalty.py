"""A penalty that local training adds to its loss, as a gradient independent of the rows."""

from collections.abc import Iterable
from typing import Protocol

import torch


class Penalty(Protocol):
    """Interface that the training loop and its report require of a penalty.

    Attributes:
        weight: The factor λ or μ.

    """

    weight: float

    def distance(self) -> float:
        """Return the distance of the weights from the global ones."""
        ...

    def value(self) -> float:
        """Return the penalty."""
        ...

    def add_gradient(self) -> float:
        """Add the penalty's gradient to each parameter's ``.grad``; return its share of the norm.

        The share is |penalty's gradient| ÷ (|penalty's gradient| + |loss's gradient|).
        """
        ...


def add_gradients(terms: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> float:
    """Add gradients to parameters' ``.grad``.

    Args:
        terms: Parameters, each with the gradient to add.

    Returns:
        Their share of the gradient norm, as in `Penalty.add_gradient`.

    """
    added = list(terms)
    ours = norm(gradient for _, gradient in added)
    theirs = norm(parameter.grad for parameter, _ in added if parameter.grad is not None)
    for parameter, gradient in added:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient
    return ours / (ours + theirs) if ours + theirs else 0.0


def norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the norm over all gradients, with one synchronisation per device."""
    return float(torch.nn.utils.get_total_norm(list(gradients)))
