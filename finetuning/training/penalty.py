"""A penalty that local training adds to its loss, as a gradient that depends on no row."""

from collections.abc import Iterable
from typing import Protocol

import torch


class Penalty(Protocol):
    """The members that the training loop requires of a penalty."""

    def distance(self) -> float:
        """Return the distance of the weights from the global ones."""
        ...

    def value(self) -> float:
        """Return the penalty."""
        ...

    def add_gradient(self) -> float:
        """Add the penalty's gradient to every parameter's ``.grad``; return its share of the norm.

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
    ours = theirs = 0.0
    for parameter, gradient in terms:
        ours += float(gradient.square().sum())
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            theirs += float(parameter.grad.square().sum())
            parameter.grad += gradient
    ours, theirs = ours**0.5, theirs**0.5
    return ours / (ours + theirs) if ours + theirs else 0.0
