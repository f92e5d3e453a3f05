"""A cap on what one client adds to the body's gradient (``split.share-cap``)."""

from collections.abc import Mapping
from dataclasses import dataclass

from split.server.share_cap import ShareCap


@dataclass(frozen=True)
class Addition:
    """Contribution of a client's micro-batch to the body's gradient.

    Attributes:
        size: Sum of the norms of its tokens' gradients of the body's output, of the sum of its
            losses.
        targets: Tokens that the client says it predicts in the micro-batch.
        step_targets: The same of its whole step.

    """

    size: float
    targets: int
    step_targets: int

    @property
    def part(self) -> float:
        """The micro-batch's part of the client's step."""
        return self.targets / self.step_targets


class GradientCap:
    """Caps three numbers of each client at a multiple of the median of the others' (``ShareCap``).

    They are the size of its gradients per target, the size of a whole step's, and the number of its
    targets in a step. The first two limit what it adds to the sum of the gradients, so that it
    gains nothing by reporting targets that it doesn't have. The third limits the number by which
    the sum is divided, so that such targets don't reduce the others' share either. A micro-batch is
    measured as if all micro-batches of its step were like it.

    The size is a sum of norms. It bounds the norm of the sum, even if the gradients of many tokens
    are alike; the norm of all of them together wouldn't.

    Args:
        multiple: Multiple of the median that a client's number may reach.

    """

    def __init__(self, multiple: float) -> None:
        self._each, self._total = ShareCap(multiple), ShareCap(multiple)
        self._targets = ShareCap(multiple)
        self._all = (self._each, self._total, self._targets)

    def factors(self, additions: Mapping[str, Addition]) -> dict[str, float]:
        """Return the factor by which each client's gradient is scaled down; 1.0 up to the caps."""
        targets = {client: addition.targets for client, addition in additions.items()}
        parts = {client: addition.part for client, addition in additions.items()}
        each = self._each.factors({c: a.size**2 / a.targets for c, a in additions.items()}, targets)
        sizes = {client: each[client] * addition.size for client, addition in additions.items()}
        total = self._total.factors({c: sizes[c] ** 2 / parts[c] for c in sizes}, parts)
        return {client: each[client] * total[client] for client in additions}

    def counted(self, additions: Mapping[str, Addition]) -> float:
        """Return how many of all targets count."""
        parts = {client: addition.part for client, addition in additions.items()}
        squares = {c: a.step_targets**2 * a.part for c, a in additions.items()}
        factors = self._targets.factors(squares, parts)
        return sum(addition.targets * factors[client] for client, addition in additions.items())

    def late_factors(self) -> tuple[float, float]:
        """Return ``ShareCap.late_factor`` of the gradients, and of the targets, added so far."""
        gradient = min(self._each.late_factor(), self._total.late_factor())
        return gradient, self._targets.late_factor()

    def times_capped(self, client: str) -> int:
        """Return how often a number of the client was capped."""
        return sum(cap.capped[client] for cap in self._all)

    def end_step(self) -> None:
        """See ``ShareCap.end_step``."""
        for cap in self._all:
            cap.end_step()

    def remove(self, client: str) -> None:
        """See ``ShareCap.remove``."""
        for cap in self._all:
            cap.remove(client)
