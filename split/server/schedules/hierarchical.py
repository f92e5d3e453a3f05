"""Schedule that averages separate body adapters of each client (FL-GLM section 3.3).

The paper copies the whole model for every client. Here, all clients share the frozen blocks, and
only the adapters and the optimizer exist once per client.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from finetuning.adapters.adapter import State
from finetuning.aggregation.robust_aggregation import distance, scale_update, update_factors
from finetuning.aggregation.weighted_mean import WeightedMean
from finetuning.training.optimization import OptimizerState
from split.model.partition import PartyName
from split.protocol.errors import ProtocolError
from split.protocol.frames import check_size
from split.protocol.training import RoundPlan
from split.server.body_adapters import BodyAdapters, SeparateTrainer
from split.server.compute import ComputeThread
from split.server.interfaces import RoundStart
from split.server.schedules.join_barrier import JoinBarrier
from split.server.schedules.wait_budget import WaitBudget
from split.server.session import POLL_SECONDS, Session
from split.settings import SplitSettings


class Hierarchical:
    """Schedule with one set of adapters and one optimizer per client.

    ``state`` contains the initial adapters by party. Adapters that clients send must have the names
    and shapes of those of the head and tail. If adapters are averaged within rounds, a round needs
    at least ``minimum`` clients.
    """

    def __init__(
        self,
        make_adapters: Callable[[], BodyAdapters],
        compute: ComputeThread,
        state: Mapping[PartyName, State],
        split: SplitSettings,
        minimum: int,
    ) -> None:
        self._compute = compute
        self._global = dict(state["body"])
        self._client_adapters = state["head"] | state["tail"]
        # The last adapters that all clients had in common, with which new ones are compared.
        self._common_body, self._common = self._global, self._client_adapters
        # The smallest factor of each client whose adapters were scaled down in the round.
        self.scaled: dict[str, float] = {}
        self._average_every = split.average_every
        self._adapters: defaultdict[str, BodyAdapters] = defaultdict(make_adapters)
        self._start = RoundStart({}, keeps_optimizers=False, seed=0)
        self._steps: dict[str, int] = {}
        self.gathered: dict[int, dict[str, State]] = {}
        self._averages: dict[str, State] = {}  # average that each client has yet to receive
        self._before: dict[str, OptimizerState] = {}  # each client's state at the round's start
        self._due: dict[str, int] = {}  # by client, the step after which its next average is due
        self._waits = WaitBudget()
        self._changed = threading.Condition()
        self.barrier = JoinBarrier(self._changed, minimum, split.join_timeout)
        self.mark_absent = self.barrier.mark_absent

    def begin_round(self, start: RoundStart) -> None:
        """Load the global body adapters into the adapters of every client in ``start.weights``."""
        with self._changed:
            self._start = start
            self._steps, self._due, self.gathered, self._averages = {}, {}, {}, {}
            self._common_body, self.scaled = self._global, {}
            if start.client_adapters is not None:
                self._common = start.client_adapters
            self._waits = WaitBudget()
            self.barrier.begin(start.weights)
        for client in start.weights:
            self._adapters[client].load(self._global)
            if not start.keeps_optimizers:
                self._adapters[client].load_optimizer({})

    def join(self, session: Session, plan: RoundPlan) -> SeparateTrainer:
        """Add a client. If adapters are averaged within the round, wait for all clients to join."""
        client = session.account.client
        with self._changed:
            self.barrier.join(client)
            # Register the client before waiting: others may begin before this thread wakes up.
            self._steps[client] = plan.steps
            self._due[client] = self._average_every
            self._waits.add(session)
            if self._average_every:
                try:
                    self.barrier.wait(client, session.lane.check)
                except RuntimeError:
                    del self._steps[client]
                    self._waits.remove(client)
                    raise
        if self._start.keeps_optimizers:
            self._before[client] = self._adapters[client].export_optimizer()
        return SeparateTrainer(session, self._adapters[client], plan)

    def leave(self, client: str, finished: bool) -> None:
        """Remove a client, and exclude it from averages that have not been computed yet.

        If the client has not finished, restore its optimizer's state from before the round, if any.
        """
        before = self._before.pop(client, None)
        if before is not None and not finished:
            self._adapters[client].load_optimizer(before)
        with self._changed:
            self._steps.pop(client, None)
            self._waits.remove(client)
            for handed_in in self.gathered.values():
                handed_in.pop(client, None)
            self._note_waiting()
            self._changed.notify_all()

    def average(self, session: Session, step: int, own: State) -> State:
        """Average the adapters of all parties over the clients with more than ``step`` steps.

        Body adapters are averaged in place. Return the average of ``own``, the adapters of the
        head and tail, over the same clients.
        """
        client = session.account.client
        with self._changed:
            self._hand_in(client, step, own)
            while client not in self._averages and self._missing_at(step):
                session.lane.check()
                self._note_waiting()
                self._changed.wait(POLL_SECONDS)
            if client not in self._averages:
                gathered = self.gathered.pop(step)
                self._note_waiting()
                self._compute.call(lambda: self._average_bodies(gathered))
                self._common = self._mean(gathered, self._common, self._start.weights)
                self._averages |= dict.fromkeys(gathered, self._common)
                self._changed.notify_all()
            return self._averages.pop(client)

    def state_of(self, client: str) -> State:
        """Return the body adapters of a client."""
        return self._adapters[client].export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the mean of the clients' body adapters, weighted by ``weights``."""
        bodies = {name: self._adapters[name].export() for name in weights}
        self._global = self._mean(bodies, self._global, weights)
        return self._global

    def export_optimizers(self) -> dict[str, State]:
        """Return the states of the optimizers by client."""
        return {name: adapters.export_optimizer() for name, adapters in self._adapters.items()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Restore the states of the clients' optimizers."""
        for client, state in states.items():
            self._adapters[client].load_optimizer(state)

    def _hand_in(self, client: str, step: int, own: State) -> None:
        if not self._average_every or step != self._due[client] or step >= self._steps[client]:
            raise RuntimeError(
                f"{client} asked for an average after step {step}, which is not due "
                f"(split.average-every = {self._average_every})"
            )
        self._check(own)
        self._due[client] += self._average_every
        self.gathered.setdefault(step, {})[client] = own
        self._note_waiting()
        self._changed.notify_all()

    def _check(self, own: State) -> None:
        """Check a client's adapters, because the other clients will receive their average."""
        expected = self._client_adapters
        for name in sorted(own.keys() | expected.keys()):
            if name not in own or name not in expected:
                raise ProtocolError(f"adapters with and without {name!r} can't be averaged")
            tensor, shape = own[name], expected[name].shape
            if tensor.dtype is not torch.float32 or tensor.shape != shape:
                raise ProtocolError(
                    f"received {name!r} as {tensor.dtype} of shape {tuple(tensor.shape)}; expected "
                    f"float32 of shape {tuple(shape)}"
                )
            check_size(tensor, name)

    def _missing_at(self, step: int) -> set[str]:
        expected = {name for name, steps in self._steps.items() if steps > step}
        return expected - self.gathered[step].keys()

    def _note_waiting(self) -> None:
        """Update the wait budget with the clients whose adapters a pending average still needs."""
        waiting = (step for step, handed_in in self.gathered.items() if handed_in)
        self._waits.note(set().union(*(self._missing_at(step) for step in waiting)))

    def _average_bodies(self, clients: Iterable[str]) -> None:
        bodies = {name: self._adapters[name].export() for name in clients}
        self._common_body = self._mean(bodies, self._common_body, self._start.weights)
        for name in clients:
            self._adapters[name].load(self._common_body)

    def _mean(
        self, states: Mapping[str, State], reference: State, weights: Mapping[str, float]
    ) -> State:
        """Return the weighted average of the clients' adapters, added up in the order of names.

        All clients began with ``reference``. A client's difference from ``reference`` is scaled
        down if the difference is much larger than those of the other clients.
        """
        distances = {name: distance(each, reference) for name, each in states.items()}
        factors = update_factors(distances, self._start.caps)
        mean = WeightedMean()
        for name in sorted(states):
            factor = factors[name]
            if factor < 1:
                self.scaled[name] = min(factor, self.scaled.get(name, 1.0))
            mean.add(scale_update(states[name], reference, factor), weights[name])
        return mean.result()
