"""A cap on one client's share, relative to the other clients' median (``split.share-cap``)."""

from collections import Counter
from collections.abc import Mapping
from statistics import median_high

# Smaller measures don't enter the median: such a client has nothing to train.
_NEGLIGIBLE = 1e-12


class ShareCap:
    """Caps a measure of each client at a multiple of the median of the others'.

    The measure is a root mean square. A client's present measure is compared with the median, over
    all *other* clients, of their measures over the whole round so far. This median depends neither
    on a single micro-batch nor on the client itself; of an even number it is the larger of the two
    in the middle. With three clients or more, a single dishonest one can therefore neither exceed
    the multiple of what is usual of an honest one, nor lower an honest client's cap below the
    multiple of what is usual of another honest one. With two clients it can't be known which of
    them is wrong: the larger is scaled down to the multiple of the smaller.

    What comes while no other client has been measured is accepted as it is, and compared as soon as
    another one has (``late_factor``).

    Args:
        multiple: Multiple of the median that a client's measure may reach.

    Attributes:
        capped: How often each client was scaled down.

    """

    def __init__(self, multiple: float) -> None:
        self.capped: Counter[str] = Counter()
        self._multiple = multiple
        self._squares: dict[str, float] = {}
        self._counts: dict[str, float] = {}
        # Sums of squares and counts that have been compared with nothing yet.
        self._unchecked: dict[str, tuple[float, float]] = {}
        self._left: set[str] = set()

    def factors(
        self, squares: Mapping[str, float], counts: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the factor by which each client is scaled down; 1.0 up to the cap.

        Args:
            squares: Present sums of squares by client.
            counts: Number of terms of each sum by client; above 0.

        """
        sums = {
            client: (
                self._squares.get(client, 0.0) + squares.get(client, 0.0),
                self._counts.get(client, 0.0) + counts.get(client, 0.0),
            )
            for client in self._squares.keys() | squares.keys()
        }
        usual = {client: (total / count) ** 0.5 for client, (total, count) in sums.items()}
        factors = {}
        for client, square in squares.items():
            others = [u for name, u in usual.items() if name != client and u > _NEGLIGIBLE]
            measure = (square / counts[client]) ** 0.5
            most = self._multiple * median_high(others) if others else measure
            factors[client] = most / measure if measure > most else 1.0
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
        """Return the factor for the sum of what was accepted before there was another client's.

        It is below 1.0 at most once: after the first call of ``factors`` that has another client to
        compare with.
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
        """Forget what has been compared with nothing: it can't be scaled down any more."""
        self._unchecked.clear()
        self._forget_left()

    def remove(self, client: str) -> None:
        """Forget a client that has broken off, once what came of it has been compared."""
        self._left.add(client)
        self._forget_left()

    def _forget_left(self) -> None:
        for client in self._left - self._unchecked.keys():
            self._squares.pop(client, None)
            self._counts.pop(client, None)
