"""Robust aggregation: caps by which no client decides an average alone (docs/robustness.md).

Each cap is relative to the other clients' median; of two values in the middle the larger counts,
so that with three clients or more a single one can neither raise its own cap nor lower that of an
honest one below what another honest client has. It suffices to compute the lower median of all
clients: for a client above it, it equals the others' median, and no other client reaches its cap.

Where nothing is capped, values are returned as they are, bit for bit.
"""

import math
from collections.abc import Mapping
from statistics import median_low

import torch

from finetuning.adapters.adapter import State

# Farthest update ÷ the others' median. Honest ones with equal numbers of steps differ by less than
# 2; Adam moves weights at most in proportion to its steps.
MAX_DISTANCE = 10.0
# A value of J ÷ what is typical of its weight, and the share of a client's J that may lie above: of
# honest clients up to 0.012, of two clients up to 0.043 (docs/robustness.md).
_MAX_IMPORTANCE = 5.0
_MAX_ABOVE = 0.1


def distance(state: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Return the Euclidean norm of an adapter's difference from another one, over all tensors."""
    squares = (
        torch.linalg.vector_norm(value.double() - reference[name].double()).square()
        for name, value in state.items()
    )
    return math.sqrt(sum(float(square) for square in squares))


def update_factors(distances: Mapping[str, float]) -> dict[str, float]:
    """Return the factor by which each client's update is scaled; 1.0 up to the cap.

    A client that has not moved tells nothing about how far the others may move.

    Args:
        distances: Distances of the clients' adapters from the global adapter that they began with.

    """
    moved = [each for each in distances.values() if each > 0]
    most = MAX_DISTANCE * median_low(moved) if moved else 0.0
    return {name: most / each if each > most else 1.0 for name, each in distances.items()}


def scaled(state: State, reference: Mapping[str, torch.Tensor], factor: float) -> State:
    """Return an adapter at a factor of its distance from another one; itself if that is 1."""
    if factor == 1:
        return state
    return {
        name: torch.lerp(reference[name].double(), value.double(), factor).float()
        for name, value in state.items()
    }


def counted_sizes(sizes: Mapping[str, int], largest: float) -> dict[str, int]:
    """Return the data sizes that count in averages: no client has more than a share of their sum.

    The size of a client with more is reduced until it has exactly that share. Where the share is
    too small for the number of clients, all count the same.

    Args:
        sizes: Numbers of rows by client, above 0.
        largest: Largest share, above 0 and at most 1.

    """
    ordered = sorted(sizes.values(), reverse=True)
    for capped, size in enumerate(ordered):
        rest, left = sum(ordered[capped:]), 1 - capped * largest
        if left <= 0:
            break
        # The sum of the sizes that count is rest ÷ left.
        if size * left <= largest * rest:
            most = max(size, int(largest * rest / left)) if capped else size
            return {name: min(each, most) for name, each in sizes.items()}
    return dict.fromkeys(sizes, min(ordered, default=1))


def typical_importance(values: torch.Tensor) -> torch.Tensor:
    """Return what is typical of each weight of a tensor: the clients' lower median of J.

    It is at least that of the clients' means over the tensor: a weight that matters to one client
    alone, such as a rare token's, has a median of 0.

    Args:
        values: J of all clients, one after another in the first dimension.

    """
    means = values.flatten(start_dim=1).mean(dim=1)
    return values.median(dim=0).values.clamp(min=float(means.median()))


class ImportanceCap:
    """Finds clients whose importance J is exaggerated, and caps it weight by weight.

    Honest values of single weights have heavy tails, so a client's J is accepted unchanged unless
    its parts above 5 times the typical values sum to more than a tenth of the rest. In that case
    each of its values is cut to the typical one. (With a cap at 5 times that, a J of 1
    everywhere would still multiply the penalty of FedJudge's Eq. 4, which is quadratic.)

    Every tensor must be added before the first one is capped.
    """

    def __init__(self) -> None:
        self._above: dict[str, float] = {}
        self._below: dict[str, float] = {}
        self._left: dict[str, float] = {}

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add a tensor of J, by client."""
        stacked = torch.stack(list(values.values())).double()
        most = _MAX_IMPORTANCE * typical_importance(stacked)
        for name, value in zip(values, stacked, strict=True):
            below = float(value.minimum(most).sum())
            self._below[name] = self._below.get(name, 0.0) + below
            self._above[name] = self._above.get(name, 0.0) + float(value.sum()) - below

    def cap(self, values: Mapping[str, torch.Tensor]) -> State:
        """Return a tensor of J by client, with that of some capped."""
        capped = [n for n, above in self._above.items() if above > _MAX_ABOVE * self._below[n]]
        if not capped:
            return dict(values)
        typical = typical_importance(torch.stack(list(values.values())))
        believed = {name: values[name].minimum(typical) for name in capped}
        for name, value in believed.items():
            self._left[name] = self._left.get(name, 0.0) + float(value.sum(dtype=torch.float64))
        return {**values, **believed}

    @property
    def factors(self) -> dict[str, float]:
        """Remaining share of the sum of J of each client that was capped."""
        return {n: left / (self._above[n] + self._below[n]) for n, left in self._left.items()}
