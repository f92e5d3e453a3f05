"""What schedules with one set of body adapters for all clients have in common."""

from collections.abc import Mapping

from finetuning.adapters.adapter import State
from split.server.branch import Branch
from split.server.session import Session


class OneBranch:
    """One set of adapters and one optimizer.

    Args:
        branch: the adapters.

    """

    # What the body's optimizer is checkpointed under: there is one for all clients.
    KEY = "body"

    def __init__(self, branch: Branch) -> None:
        self._branch = branch

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Let the optimizer go on or start anew.

        Args:
            weights: of the clients that may join, by name.
            keep_optimizers: whether it goes on.
            seed: of the round.

        """
        if not keep_optimizers:
            self._branch.load_optimizer({})

    def average(self, session: Session, step: int, own: State) -> State:
        """Refuse: there is nothing of one client's own to average within a round.

        Raises:
            RuntimeError: always.

        """
        raise RuntimeError("with this split.schedule clients don't average within a round")

    def state_of(self, client: str) -> State:
        """Give the body's adapters, which are everybody's."""
        return self._branch.export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Give the adapters as they are; there is nothing to average."""
        return self._branch.export()

    def export_optimizers(self) -> dict[str, State]:
        """Give the optimizer's state, under the one key that there is."""
        return {self.KEY: self._branch.export_optimizer()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Put the optimizer's state back; without one it starts anew."""
        self._branch.load_optimizer(states.get(self.KEY, {}))
