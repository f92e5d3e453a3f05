"""Base of the schedules with one set of body adapters for all clients."""

from collections.abc import Mapping

import torch

from finetuning.adapters.adapter import State
from split.server.body_adapters import BodyAdapters
from split.server.session import Session


class SharedAdapters:
    """One set of adapters and one optimizer.

    Args:
        adapters: The body with the clients' common adapters.

    """

    # The key of the one optimizer in a checkpoint.
    KEY = "body"

    def __init__(self, adapters: BodyAdapters) -> None:
        self._adapters = adapters

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Keep the optimizer, or replace it by a new one.

        Args:
            weights: Weights of the clients that may join, by name.
            keep_optimizers: Whether the optimizer is kept.
            seed: Seed of the round.

        """
        if not keep_optimizers:
            self._adapters.load_optimizer({})

    def begin_with(self, own: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: heads and tails aren't averaged within a round."""

    def average(self, session: Session, step: int, own: State) -> State:
        """Raise: there are no adapters of one client to average within a round.

        Raises:
            RuntimeError: Always.

        """
        raise RuntimeError("with this split.schedule clients don't average within a round")

    def state_of(self, client: str) -> State:
        """Return the body's adapters, the same for every client."""
        return self._adapters.export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the adapters; there is nothing to average."""
        return self._adapters.export()

    @property
    def scaled(self) -> dict[str, float]:
        """Nobody: there are no adapters of one client to scale down."""
        return {}

    def export_optimizers(self) -> dict[str, State]:
        """Return the optimizer's state by its one key."""
        return {self.KEY: self._adapters.export_optimizer()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Restore the optimizer's state, or make a new optimizer where there is none."""
        self._adapters.load_optimizer(states.get(self.KEY, {}))
