"""Clients take turns with one set of body adapters (FL-GLM section 3.3, serial training)."""

import threading
from collections.abc import Mapping

from split.branch import Branch, State


class Serial:
    """One set of adapters and one optimizer that pass from turn to turn.

    Args:
        branch: the adapters.

    """

    # What the body is checkpointed under: there is one for all clients.
    KEY = "body"

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._turn = ""
        self._lock = threading.Lock()

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool) -> None:
        """Let the optimizer go on or start anew; the clients' weights don't matter."""
        if not keep_optimizers:
            self._branch.load_optimizer({})

    def enter(self, client: str, steps: int) -> Branch:
        """Begin a client's turn.

        Args:
            client: who.
            steps: how many it will take; they don't matter.

        Raises:
            RuntimeError: another client's turn hasn't ended.

        """
        with self._lock:
            if self._turn:
                raise RuntimeError(f"it is {self._turn}'s turn, and {client}'s has not come")
            self._turn = client
        return self._branch

    def leave(self, client: str) -> None:
        """End a client's turn."""
        with self._lock:
            if self._turn == client:
                self._turn = ""

    def average(self, client: str, step: int, own: State) -> State:
        """Refuse: a turn is a whole round, after which heads and tails are averaged.

        Raises:
            RuntimeError: always.

        """
        raise RuntimeError("clients that take turns don't average within a round")

    def state_of(self, client: str) -> State:
        """Give the body's adapters as a client's last turn or a later one left them."""
        return self._branch.export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Give the adapters after the last turn; there is nothing to average."""
        return self._branch.export()

    def export_optimizers(self) -> dict[str, State]:
        """Give the optimizer's state, under the one key that there is."""
        return {self.KEY: self._branch.export_optimizer()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Put the optimizer's state back; without one it starts anew."""
        self._branch.load_optimizer(states.get(self.KEY, {}))
