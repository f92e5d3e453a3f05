"""Base class of the schedules with one set of body adapters for all clients."""

from collections.abc import Mapping

from finetuning.adapters.adapter import State
from split.server.body_adapters import BodyAdapters
from split.server.session import Session


class SharedAdapters:
    """Base class of schedules in which all clients share the adapters and the optimizer."""

    def __init__(self, adapters: BodyAdapters) -> None:
        self._adapters = adapters

    def begin_round(
        self, weights: Mapping[str, float], keep_optimizers: bool, seed: int, own: State | None
    ) -> None:
        """Begin a round, with a new optimizer unless ``keep_optimizers`` is true."""
        if not keep_optimizers:
            self._adapters.load_optimizer({})

    def average(self, session: Session, step: int, own: State) -> State:
        """Raise a RuntimeError, because clients have no separate adapters to average."""
        raise RuntimeError("with this split.schedule, adapters are not averaged within a round")

    def state_of(self, client: str) -> State:
        """Return the body adapters, which are the same for every client."""
        return self._adapters.export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the adapters, which need not be averaged."""
        return self._adapters.export()

    @property
    def scaled(self) -> dict[str, float]:
        """Empty, because clients have no separate adapters to scale down."""
        return {}

    def export_optimizers(self) -> dict[str, State]:
        """Return a dictionary with the state of the optimizer as its only item."""
        return {"body": self._adapters.export_optimizer()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Restore the state of the optimizer, or create a new optimizer if there is no state."""
        self._adapters.load_optimizer(states.get("body", {}))
