"""Every client trains body adapters of its own, which are averaged (FL-GLM section 3.3).

The paper copies the whole model for every client. Here the frozen blocks exist once, and a client
adds its adapters and their optimizer.
"""

import threading
from collections.abc import Callable, Iterable, Mapping

import torch

from finetuning.adapters.adapter import State
from split.server.branch import Branch
from split.server.compute import ComputeThread
from split.server.round_plan import RoundPlan
from split.server.schedules.joining import Joining
from split.server.seat import Alone
from split.server.session import Session

_POLL_SECONDS = 1.0


class Hierarchical:
    """One set of adapters and one optimizer per client.

    Args:
        make_branch: makes a client's adapters and optimizer.
        compute: does what touches the adapters.
        state: the body's adapters to begin with.
        ends: adapters of a head and a tail, for their names and shapes.
        minimum: clients who must have joined when those who average begin.
        average_every: steps after which clients average within a round; 0 for never.
        join_timeout: seconds that clients who average wait for each other at a round's start.

    """

    def __init__(
        self,
        make_branch: Callable[[], Branch],
        compute: ComputeThread,
        state: Mapping[str, torch.Tensor],
        ends: Mapping[str, torch.Tensor],
        minimum: int,
        average_every: int,
        join_timeout: float,
    ) -> None:
        self._make_branch = make_branch
        self._compute = compute
        self._global = dict(state)
        self._ends = ends
        self._average_every = average_every
        self._branches: dict[str, Branch] = {}
        self._weights: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._gathered: dict[int, dict[str, State]] = {}
        self._averages: dict[str, State] = {}  # by the clients who have not taken them yet
        self._due: dict[str, int] = {}  # after which step each client averages next
        self._changed = threading.Condition()
        self._joining = Joining(self._changed, minimum, join_timeout)

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Give every client the average that the last round ended with.

        Args:
            weights: of the clients that may join.
            keep_optimizers: whether optimizers go on or start anew.
            seed: of the round; each client has its own.

        """
        with self._changed:
            self._weights = dict(weights)
            self._steps, self._due, self._gathered, self._averages = {}, {}, {}, {}
            self._joining.begin(weights)
        for client in weights:
            if client not in self._branches:
                self._branches[client] = self._make_branch()
            self._branches[client].load(self._global)
            if not keep_optimizers:
                self._branches[client].load_optimizer({})

    def enter(self, session: Session, plan: RoundPlan) -> Alone:
        """Let a client join; those who average within a round wait until all have.

        Args:
            session: of the client's lane.
            plan: its round.

        Raises:
            RuntimeError: the round went on without it, or too few joined.

        """
        client = session.account.client
        with self._changed:
            self._joining.join(client)
            # Before it waits: others may begin before it wakes, and must know of it.
            self._steps[client] = plan.steps
            self._due[client] = self._average_every
            if self._average_every:
                try:
                    self._joining.wait(client)
                except RuntimeError:
                    del self._steps[client]
                    raise
        return Alone(session, self._branches[client], plan)

    def leave(self, client: str, finished: bool) -> None:
        """Let a client go, in time or not; nobody waits for it any more."""
        with self._changed:
            self._steps.pop(client, None)
            self._changed.notify_all()

    def average(self, session: Session, step: int, own: State) -> State:
        """Average all parties' adapters over the clients that train beyond this step.

        Args:
            session: of a client's lane.
            step: how many steps of the round are done.
            own: the client's head and tail adapters.

        Returns:
            The average of heads and tails. The body's adapters are averaged in place.

        Raises:
            RuntimeError: no average is due for this client, its adapters are not those of head and
                tail.
            LaneError: its lane ended.

        """
        client = session.account.client
        with self._changed:
            if client not in self._averages and client not in self._gathered.get(step, {}):
                self._hand_in(client, step, own)
            while client not in self._averages and not self._all_at(step):
                session.lane.check()
                self._changed.wait(_POLL_SECONDS)
            if client not in self._averages:
                gathered = self._gathered.pop(step)
                self._compute.call(lambda: self._average_bodies(gathered))
                self._averages |= dict.fromkeys(gathered, self._mean(gathered))
                self._changed.notify_all()
            return self._averages.pop(client)

    def state_of(self, client: str) -> State:
        """Give a client's own adapters."""
        return self._branches[client].export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Average the adapters of the clients whose round counts."""
        self._weights = dict(weights)
        self._global = self._mean({name: self._branches[name].export() for name in weights})
        return self._global

    def export_optimizers(self) -> dict[str, State]:
        """Give each client's optimizer state."""
        return {name: branch.export_optimizer() for name, branch in self._branches.items()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Put the clients' optimizers back."""
        for name, state in states.items():
            if name not in self._branches:
                self._branches[name] = self._make_branch()
            self._branches[name].load_optimizer(state)

    def _hand_in(self, client: str, step: int, own: State) -> None:
        if not self._average_every or step != self._due[client] or step >= self._steps[client]:
            raise RuntimeError(
                f"{client} asked for an average after step {step}, which is not due "
                f"(split.average-every = {self._average_every})"
            )
        odd = {n for n in own.keys() | self._ends.keys() if not _alike(n, own, self._ends)}
        if odd:
            raise RuntimeError(f"{client} sent {min(odd)} otherwise than the adapters have it")
        self._due[client] += self._average_every
        self._gathered.setdefault(step, {})[client] = own
        self._changed.notify_all()

    def _all_at(self, step: int) -> bool:
        expected = {name for name, steps in self._steps.items() if steps > step}
        return expected <= self._gathered[step].keys()

    def _average_bodies(self, clients: Iterable[str]) -> None:
        mean = self._mean({name: self._branches[name].export() for name in clients})
        for name in clients:
            self._branches[name].load(mean)

    def _mean(self, states: Mapping[str, State]) -> State:
        """Average by the clients' weights, in the order of names."""
        total = sum(self._weights[name] for name in states)
        mean: State = {}
        for name in sorted(states):
            share = self._weights[name] / total
            for key, value in states[name].items():
                mean[key] = mean[key] + share * value if key in mean else share * value
        return mean


def _alike(name: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return name in one and name in other and one[name].shape == other[name].shape
