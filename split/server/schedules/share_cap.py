"""A cap on the values of a client, relative to other clients' median (``split.share-cap``)."""

from collections import Counter
from collections.abc import Mapping
from statistics import median_high

# Smaller values are left out of the median: they come from clients with nothing to train.
_NEGLIGIBLE = 1e-12


class ShareCap:
    """Cap on a value of each client, at a multiple of the median over the other clients.

    The value is a root mean square (RMS), such as that of the gradients that a client has sent. A
    client's current RMS is compared with the median RMS of the *other* clients over the whole round
    so far. Of an even number of values, the median is the larger middle one. Suppose that there are
    three or more clients, and that each has sent its first value. Then a single dishonest client
    can neither exceed the multiple of an honest client's RMS, nor lower the cap of an honest client
    below the multiple of another honest client's RMS. With two clients, it is unknown which one is
    dishonest: the larger value is capped at ``multiple`` times the smaller.

    Values that arrive before any value of another client are accepted, and compared as soon as
    one has arrived (``late_factor``).
    """

    def __init__(self, multiple: float) -> None:
        self.capped: Counter[str] = Counter()  # how often each client was scaled down
        self._multiple = multiple
        self._squares: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        # Sums of squares and counts that could not be compared yet.
        self._unchecked: dict[str, tuple[float, float]] = {}
        self._left: set[str] = set()

    def factors(
        self, squares: Mapping[str, float], counts: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the factor that scales down each client's value; 1.0 within the cap.

        ``squares`` contains each client's current sum of squares, and ``counts`` its number of
        terms, which is greater than 0.
        """
        usual = {}
        for client in self._squares.keys() | squares.keys():
            total = self._squares.get(client, 0.0) + squares.get(client, 0.0)
            count = self._counts.get(client, 0.0) + counts.get(client, 0.0)
            usual[client] = (total / count) ** 0.5
        factors = {}
        for client, square in squares.items():
            others = [u for name, u in usual.items() if name != client and u > _NEGLIGIBLE]
            measure = (square / counts[client]) ** 0.5
            cap = self._multiple * median_high(others) if others else measure
            factors[client] = cap / measure if measure > cap else 1.0
            if not others and measure > _NEGLIGIBLE:
                total, count = self._unchecked.get(client, (0.0, 0.0))
                self._unchecked[client] = (total + square, count + counts[client])
        for client, factor in factors.items():
            self.capped[client] += factor < 1
            accepted = squares[client] * factor**2
            self._squares[client] = self._squares.get(client, 0.0) + accepted
            self._counts[client] = self._counts.get(client, 0.0) + counts[client]
        return factors

    def late_factor(self) -> float:
        """Return the factor for the sum of the values that were accepted without a comparison.

        The factor is below 1.0 at most once: after the first call of ``factors`` in which these
        values can be compared with another client.
        """
        usual = [
            (square / self._counts[client]) ** 0.5
            for client, square in self._squares.items()
            if client not in self._unchecked
        ]
        others = [measure for measure in usual if measure > _NEGLIGIBLE]
        if not self._unchecked or not others:
            return 1.0
        squares, counts = zip(*self._unchecked.values(), strict=True)
        measure = (sum(squares) / sum(counts)) ** 0.5
        factor: float = min(1.0, self._multiple * median_high(others) / measure)
        for client in self._unchecked:
            self.capped[client] += factor < 1
            self._squares[client] *= factor**2
        self.end_step()
        return factor

    def end_step(self) -> None:
        """Clear the values that were not compared, because they can no longer be scaled down."""
        self._unchecked.clear()
        self._forget_left()

    def remove(self, client: str) -> None:
        """Remove a client that left early, as soon as its values have been compared."""
        self._left.add(client)
        self._forget_left()

    def _forget_left(self) -> None:
        for client in self._left - self._unchecked.keys():
            self._squares.pop(client, None)
            self._counts.pop(client, None)
