"""Caps on the influence of one client on the gradients (``split.share-cap``)."""

from collections.abc import Mapping
from dataclasses import dataclass

from split.server.schedules.share_cap import ShareCap


@dataclass(frozen=True)
class Addition:
    """Contribution of a client's micro-batch to the body's gradient.

    ``size`` is the sum of the norms of the tokens' gradients. A token's gradient is that of the
    summed loss with respect to the body's output at the token.
    """

    size: float
    targets: int  # number of predicted tokens in the micro-batch, as the client reported it
    step_targets: int  # number of predicted tokens in the client's whole step, as reported

    @property
    def part(self) -> float:
        """The micro-batch's share of the targets of the client's step."""
        return self.targets / self.step_targets


class GradientCap:
    """Caps on four values of each client, relative to the median of other clients (``ShareCap``).

    The values are the size of the gradients per target, the size of the gradients per step, the
    number of targets per step, and the reported norm of the head's and tail's gradients. The first
    two caps limit the contribution to the sum of the gradients, so reporting too many targets has
    no advantage. The third cap limits the number by which the sum is divided, so too many targets
    don't reduce other clients' shares. The values per step are extrapolated from each micro-batch.

    The size is a sum of norms over tokens, because this is an upper bound on the norm of the sum of
    the tokens' gradients, even if many of them have the same direction.
    """

    def __init__(self, multiple: float) -> None:
        self._caps = [ShareCap(multiple) for _ in range(4)]
        self._each, self._total, self._targets, self._norms = self._caps

    def factors(self, additions: Mapping[str, Addition]) -> dict[str, float]:
        """Return the factor that scales down each client's gradient; 1.0 within the caps."""
        targets = {client: addition.targets for client, addition in additions.items()}
        parts = {client: addition.part for client, addition in additions.items()}
        each = self._each.factors({c: a.size**2 / a.targets for c, a in additions.items()}, targets)
        sizes = {client: each[client] * addition.size for client, addition in additions.items()}
        total = self._total.factors({c: sizes[c] ** 2 / parts[c] for c in sizes}, parts)
        return {client: each[client] * total[client] for client in additions}

    def counted(self, additions: Mapping[str, Addition]) -> float:
        """Return the number of all clients' targets after the cap."""
        parts = {client: addition.part for client, addition in additions.items()}
        squares = {c: a.step_targets**2 * a.part for c, a in additions.items()}
        factors = self._targets.factors(squares, parts)
        return sum(addition.targets * factors[client] for client, addition in additions.items())

    def late_factors(self) -> tuple[float, float]:
        """Return ``ShareCap.late_factor`` for the gradients and for the targets so far."""
        gradient = min(self._each.late_factor(), self._total.late_factor())
        return gradient, self._targets.late_factor()

    def end_step(self, squared_norms: Mapping[str, float]) -> dict[str, float]:
        """End a step; return the factor that scales down each client's reported norm."""
        factors = self._norms.factors(squared_norms, dict.fromkeys(squared_norms, 1))
        for cap in self._caps:
            cap.end_step()
        return factors

    def times_capped(self, client: str) -> int:
        """Return how often a value of a client was scaled down."""
        return sum(cap.capped[client] for cap in self._caps)

    def remove(self, client: str) -> None:
        """Remove a client that left early from the medians; see ``ShareCap.remove``."""
        for cap in self._caps:
            cap.remove(client)
