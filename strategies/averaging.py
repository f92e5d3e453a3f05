"""How the server averages adapters: by data size, with caps, then the server's update."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import INFO

from flwr.common import log

from federation.run_config import RunConfig
from finetuning.adapters.adapter import State
from finetuning.aggregation.factor_error import factor_error, pair_factors
from finetuning.aggregation.mixed_ranks import average_ranks
from finetuning.aggregation.robust_aggregation import (
    MAX_DISTANCE,
    MAX_DISTANCE_EQUAL_STEPS,
    believed_sizes,
    counted_sizes,
    distance,
    scale_update,
    update_caps,
    update_factors,
)
from finetuning.aggregation.weighted_mean import WeightedMean
from strategies.journal import Journal, record_scaled
from strategies.server_update import server_update

StateOf = Callable[[str], State]  # returns a client's adapter, given its name


class Averaging:
    """Averages a round's adapters, within the caps of docs/security.md#caps-on-averages.

    ``agreed`` contains the agreed numbers of rows by name; None believes all data sizes.
    """

    def __init__(
        self, config: RunConfig, agreed: Mapping[str, int] | None, journal: Journal
    ) -> None:
        self._config = config
        self._agreed = agreed
        self._journal = journal
        self._update = server_update(config.server)

    def average(
        self,
        round_number: int,
        sizes: Mapping[str, int],
        state_of: StateOf,
        reference: State,
        update_state: State,
        ranked: Iterable[tuple[str, State]] | None = None,
    ) -> tuple[State, State]:
        """Return the global adapter after a round, and the next state of ``server.update``.

        ``sizes`` are the clients' data sizes, ``reference`` is the round's initial adapter, and
        ``update_state`` the state of ``server.update`` from before the round. If ranks differ,
        ``ranked`` contains the clients' tensors by name and client, and ``state_of`` returns
        adapters with the components of ``reference`` that a client lacks.
        """
        counted = self.counted(sizes)
        factors = self._factors(sizes, state_of, reference)
        self._record(round_number, sizes, counted, factors)
        if ranked is None:
            mean = self._mean(counted, factors, state_of, reference)
        else:
            mean = average_ranks(_scaled(ranked, factors, reference), counted, reference)
        return self._update.apply(reference, mean, update_state)

    def counted(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the data sizes to use as weights, limited by agreements and ``max-share``."""
        if self._config.sums.enabled:  # of groups, whose members have limited their shares
            return dict(sizes)
        believed = believed_sizes(sizes, self._agreed)
        return counted_sizes(believed, self._config.max_share)

    def caps(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """Return each client's largest distance, as a multiple of the clients' median."""
        usual = MAX_DISTANCE_EQUAL_STEPS if self._config.train.local_steps else MAX_DISTANCE
        most = self._config.max_distance or usual
        if self._config.sums.enabled:  # of groups, too few of which have no meaningful median
            return dict.fromkeys(sizes, most if len(sizes) > 2 else math.inf)
        return update_caps(sizes, self._agreed, most)

    def record_factor_error(
        self, round_number: int, sizes: Mapping[str, int], tensors: Iterable[tuple[str, State]]
    ) -> None:
        """Record by how much the average of LoRA's factors differs from that of their products.

        ``tensors`` are the clients' tensors by name and client.
        """
        error = factor_error(pair_factors(tensors), self.counted(sizes))
        if error is not None:
            log(INFO, "Averaging A and B apart has an error of %.1f %%", 100 * error)
            self._journal.record({"event": "factors", "round": round_number, "error": error})

    def _factors(
        self, sizes: Mapping[str, int], state_of: StateOf, reference: State
    ) -> dict[str, float]:
        """Return the factor that shortens each client's update to its cap; 1.0 up to the cap."""
        distances = {name: distance(state_of(name), reference) for name in sizes}
        return update_factors(distances, self.caps(sizes))

    def _record(
        self,
        round_number: int,
        sizes: Mapping[str, int],
        counted: Mapping[str, int],
        factors: Mapping[str, float],
    ) -> None:
        """Record the clients whose updates or data sizes are capped."""
        shares = {name: counted[name] / size for name, size in sizes.items()}
        record_scaled(self._journal, round_number, "update", factors)
        record_scaled(self._journal, round_number, "data size", shares)

    def _mean(
        self,
        counted: Mapping[str, int],
        factors: Mapping[str, float],
        state_of: StateOf,
        reference: State,
    ) -> State:
        """Return the mean of the clients' adapters, weighted by data size (FedJudge Eq. 2)."""
        mean = WeightedMean()
        for name, factor in factors.items():
            mean.add(scale_update(state_of(name), reference, factor), counted[name])
        return mean.result()


def _scaled(
    tensors: Iterable[tuple[str, State]], factors: Mapping[str, float], reference: State
) -> Iterator[tuple[str, State]]:
    """Shorten the updates in tensors by name and client, whose ranks may be smaller."""
    for name, values in tensors:
        scaled: State = {}
        for client, value in values.items():
            own = reference[name][: value.shape[0], : value.shape[1]]
            scaled |= {client: scale_update({name: value}, {name: own}, factors[client])[name]}
        yield name, scaled
