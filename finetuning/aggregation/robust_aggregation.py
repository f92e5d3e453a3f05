"""Robust aggregation: caps that limit a single client's influence (docs/security.md).

Each cap is relative to the median of the other clients' values; if their number is even, the upper
of the two middle values is used. With three or more clients, a single client can therefore neither
raise its own cap nor push an honest client's cap below the value of another honest client. Only the
lower median of all clients' values is computed: it equals the median of the other clients' values
for every client above it, and the remaining clients do not reach their caps.

Values that are not capped are returned unchanged, bit for bit.
"""

import math
from collections.abc import Mapping
from statistics import median_low

import torch

from finetuning.adapters.adapter import State

# Maximum ratio of an update's norm to the median norm, and the same if all clients take equally
# many steps. The norms of honest clients then differ by a factor below 2 (docs/security.md); with
# Adam, a norm grows at most linearly with the steps.
MAX_DISTANCE, MAX_DISTANCE_EQUAL_STEPS = 10.0, 3.0
# Maximum ratio of a data size that nobody has agreed on to the median data size.
MAX_SIZE = 3.0
# Ratio to the typical value above which importance J is excessive, and maximum ratio of the sum of
# a client's excess to the sum of the rest. Honest clients with generated data reached 0.043.
_MAX_IMPORTANCE = 5.0
_MAX_ABOVE = 0.1


def distance(state: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Return the Euclidean norm of the difference between two adapters, over all tensors."""
    squares = (
        torch.linalg.vector_norm(value.double() - reference[name].double()).square()
        for name, value in state.items()
    )
    return math.sqrt(sum(float(square) for square in squares))


def update_factors(distances: Mapping[str, float], caps: Mapping[str, float]) -> dict[str, float]:
    """Return the factor by which each client's update is scaled; 1.0 up to the cap.

    ``distances`` are the distances between the clients' adapters and the previous global adapter,
    and ``caps`` the clients' maximum ratios to the median distance; by default, 10.
    Clients with a distance of 0 are ignored when the median is computed.
    """
    moved = [each for each in distances.values() if each > 0]
    median = median_low(moved) if moved else 0.0
    max_distances = {name: caps.get(name, MAX_DISTANCE) * median for name in distances}
    return {
        n: max_distances[n] / each if each > max_distances[n] else 1.0
        for n, each in distances.items()
    }


def update_caps(
    sizes: Mapping[str, int], agreed: Mapping[str, int] | None, max_ratio: float
) -> dict[str, float]:
    """Return each client's maximum ratio of its update's norm to the median norm.

    It is ``max_ratio``; for a client without an agreement (see `believed_sizes`), divided by the
    ratio of its believed size to the median if that is above 1. Otherwise, the client could exceed
    the typical influence, the product of weight and norm, by the product of both caps.
    """
    believed = believed_sizes(sizes, agreed)
    known = sizes.keys() if agreed is None else agreed.keys()
    median = median_low(believed.values()) if believed else 1
    return {
        n: max_ratio if n in known else max_ratio / max(1.0, s / median)
        for n, s in believed.items()
    }


def scale_update(state: State, reference: Mapping[str, torch.Tensor], factor: float) -> State:
    """Scale an adapter's difference from ``reference``; return ``state`` itself if factor is 1."""
    if factor == 1:
        return state
    return {
        name: torch.lerp(reference[name].double(), value.double(), factor).float()
        for name, value in state.items()
    }


def believed_sizes(sizes: Mapping[str, int], agreed: Mapping[str, int] | None) -> dict[str, int]:
    """Return data sizes that are at most those agreed on with the clients.

    The size of a client without an agreement is at most 3 times the median size. None means that
    all sizes are agreed on.
    """
    if agreed is None or not sizes:
        return dict(sizes)
    known = {name: min(size, agreed.get(name, size)) for name, size in sizes.items()}
    max_size = int(MAX_SIZE * median_low(known.values()))
    return {n: size if n in agreed else min(size, max_size) for n, size in known.items()}


def counted_sizes(sizes: Mapping[str, int], max_share: float) -> dict[str, int]:
    """Return data sizes to use in averages; none exceeds the share ``max_share`` of their sum.

    The size of a larger client is reduced to this share, which must be above 0 and at most 1. If
    the share is too small for the number of clients, all returned sizes are equal.
    """
    ordered = sorted(sizes.values(), reverse=True)
    for capped, size in enumerate(ordered):
        rest, left = sum(ordered[capped:]), 1 - capped * max_share
        if left <= 0:
            break
        # The sum of the returned sizes is rest ÷ left.
        if size * left <= max_share * rest:
            max_size = max(size, int(max_share * rest / left)) if capped else size
            return {name: min(each, max_size) for name, each in sizes.items()}
    return dict.fromkeys(sizes, min(ordered, default=1))


def typical_importance(values: torch.Tensor) -> torch.Tensor:
    """Return the typical J of each weight of a tensor: the lower median over the clients.

    The values of the clients are stacked along the first dimension. The result is at least the
    lower median of the clients' means over the tensor, because a weight that matters to only one
    client, such as a weight for a rare token, has a median of 0.
    """
    means = values.flatten(start_dim=1).mean(dim=1)
    return values.median(dim=0).values.clamp(min=float(means.median()))


class ImportanceCap:
    """Find clients with exaggerated importance J, and cap J for each weight of these clients.

    J of single weights is heavy-tailed even for honest clients. Therefore a client's J is accepted
    unchanged unless the amounts above 5 times the typical values sum to more than a tenth of the
    rest. In that case each of the client's values is capped at the typical value. (With a cap that
    is 5 times as high, a J of 1 everywhere would still inflate the penalty of FedJudge Eq. 3.)

    Call `add` for every tensor before the first call of `cap`.
    """

    def __init__(self) -> None:
        self._above: dict[str, float] = {}
        self._below: dict[str, float] = {}
        self._left: dict[str, float] = {}

    def add(self, values: Mapping[str, torch.Tensor]) -> None:
        """Add one tensor of each client's J, keyed by client."""
        stacked = torch.stack(list(values.values())).double()
        limit = _MAX_IMPORTANCE * typical_importance(stacked)
        for name, value in zip(values, stacked, strict=True):
            below = float(value.minimum(limit).sum())
            self._below[name] = self._below.get(name, 0.0) + below
            self._above[name] = self._above.get(name, 0.0) + float(value.sum()) - below

    def cap(self, values: Mapping[str, torch.Tensor]) -> State:
        """Return one tensor of each client's J, capped for the clients with exaggerated J."""
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
        """Share of the sum of J that remains, for each capped client."""
        return {n: left / (self._above[n] + self._below[n]) for n, left in self._left.items()}
