"""The weighted mean of states that are added one at a time (FedJudge Eq. 2)."""

import torch

from finetuning.adapters.adapter import State


class WeightedMean:
    """A weighted mean of states whose tensors have the same names and shapes.

    Sums are float64, so in nearly all cases the result is the exact mean rounded to float32. Add
    states in a fixed order for bit-identical results. The sums take 8 bytes for each parameter,
    regardless of the number of states.

    >>> mean = WeightedMean()
    >>> mean.add({"weight": torch.tensor([1.0, 2.0])}, 24)
    >>> mean.add({"weight": torch.tensor([4.0, 2.0])}, 12)
    >>> mean.result()
    {'weight': tensor([2., 2.])}
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._total = 0.0

    def add(self, state: State, weight: float) -> None:
        """Add a state."""
        self._total += weight
        for name, value in state.items():
            if name in self._sums:
                self._sums[name].add_(value, alpha=weight)
            else:
                self._sums[name] = value.double() * weight

    def result(self) -> State:
        """Return the mean as float32, and release the sums."""
        return {name: (self._sums.pop(name) / self._total).float() for name in list(self._sums)}
