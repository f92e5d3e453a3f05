"""Every client trains body adapters of its own, which are averaged (FL-GLM section 3.3).

The paper copies the whole model for every client. Here the frozen blocks exist once, and a client
adds its adapters and their optimizer.
"""

import threading
import time
from collections.abc import Callable, Mapping

import torch

from split.branch import Branch, State


class Hierarchical:
    """One set of adapters and one optimizer per client.

    Args:
        make_branch: makes a client's adapters and optimizer.
        state: the body's adapters to begin with.
        ends: adapters of a head and a tail, for their names and shapes.
        minimum: clients who must have joined when those who average begin.
        average_every: steps after which clients average within a round; 0 for never.
        join_timeout: seconds that clients who average wait for each other at a round's start.

    """

    def __init__(
        self,
        make_branch: Callable[[], Branch],
        state: Mapping[str, torch.Tensor],
        ends: Mapping[str, torch.Tensor],
        minimum: int,
        average_every: int,
        join_timeout: float,
    ) -> None:
        self._make_branch = make_branch
        self._global = dict(state)
        self._ends = ends
        self._minimum = minimum
        self._average_every = average_every
        self._join_timeout = join_timeout
        self._branches: dict[str, Branch] = {}
        self._weights: dict[str, float] = {}
        self._steps: dict[str, int] = {}
        self._started = False
        self._gathered: dict[int, dict[str, State]] = {}
        self._averages: dict[int, State] = {}
        self._changed = threading.Condition()

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool) -> None:
        """Give every client the average that the last round ended with.

        Args:
            weights: of the clients that may join.
            keep_optimizers: whether optimizers go on or start anew.

        """
        with self._changed:
            self._weights = dict(weights)
            self._steps, self._gathered, self._averages = {}, {}, {}
            self._started = False
        for client in weights:
            if client not in self._branches:
                self._branches[client] = self._make_branch()
            self._branches[client].load(self._global)
            if not keep_optimizers:
                self._branches[client].load_optimizer({})

    def enter(self, client: str, steps: int) -> Branch:
        """Let a client join; those who average within a round wait until all have.

        Args:
            client: who.
            steps: how many it will take in this round.

        Raises:
            RuntimeError: the round went on without it, or too few joined.

        """
        with self._changed:
            if self._started:
                raise RuntimeError(
                    f"{client} joined after split.join-timeout = {self._join_timeout:g} s, and the "
                    "others went on without it"
                )
            self._steps[client] = steps
            self._changed.notify_all()
            if self._average_every:
                self._wait_for_all()
        return self._branches[client]

    def leave(self, client: str) -> None:
        """Let a client go, in time or not; nobody waits for it any more."""
        with self._changed:
            self._steps.pop(client, None)
            self._changed.notify_all()

    def average(self, client: str, step: int, own: State) -> State:
        """Average all parties' adapters over the clients that train beyond this step.

        Args:
            client: who.
            step: how many steps of the round are done.
            own: the client's head and tail adapters.

        Returns:
            The average of heads and tails. The body's adapters are averaged in place.

        Raises:
            RuntimeError: no average is due, or the adapters are not those of head and tail.

        """
        if not self._average_every or not step or step % self._average_every:
            raise RuntimeError(
                f"{client} asked for an average after step {step}, and split.average-every = "
                f"{self._average_every}"
            )
        odd = {n for n in own.keys() | self._ends.keys() if not _alike(n, own, self._ends)}
        if odd:
            raise RuntimeError(f"{client} sent {min(odd)} otherwise than the adapters have it")
        with self._changed:
            self._gathered.setdefault(step, {})[client] = own
            self._changed.notify_all()
            self._changed.wait_for(lambda: step in self._averages or self._all_at(step))
            if step not in self._averages:
                gathered = self._gathered[step]
                body = self._mean({name: self._branches[name].export() for name in gathered})
                for name in gathered:
                    self._branches[name].load(body)
                self._averages[step] = self._mean(gathered)
                self._changed.notify_all()
            return self._averages[step]

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

    def _wait_for_all(self) -> None:
        end = time.monotonic() + self._join_timeout
        self._changed.wait_for(
            lambda: self._started or self._weights.keys() <= self._steps.keys(),
            timeout=end - time.monotonic(),
        )
        if not self._started and len(self._steps) < self._minimum:
            raise RuntimeError(
                f"{len(self._steps)} of {len(self._weights)} clients joined within "
                f"split.join-timeout = {self._join_timeout:g} s, and min-nodes = {self._minimum} "
                "are needed at once; a simulation runs as many clients at once as there are "
                "client-resources-num-cpus in init-args-num-cpus"
            )
        self._started = True
        self._changed.notify_all()

    def _all_at(self, step: int) -> bool:
        expected = {name for name, steps in self._steps.items() if steps > step}
        return expected <= self._gathered[step].keys()

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
