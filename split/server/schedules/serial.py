"""Schedules with one set of body adapters: their base class, and serial training.

In serial training (FL-GLM section 3.3), clients train one after another.
"""

import threading
from collections.abc import Mapping

from finetuning.adapters.adapter import State
from split.protocol.training import RoundPlan
from split.server.body_adapters import BodyAdapters, SeparateTrainer
from split.server.interfaces import RoundStart
from split.server.session import Session


class SharedAdapters:
    """Base class of schedules in which all clients share the adapters and the optimizer."""

    def __init__(self, adapters: BodyAdapters) -> None:
        self.adapters = adapters
        self.scaled: dict[str, float] = {}  # clients have no separate adapters to scale down

    def begin_round(self, start: RoundStart) -> None:
        """Begin a round, with a new optimizer unless optimizers keep their state."""
        if not start.keeps_optimizers:
            self.adapters.load_optimizer({})

    def average(self, session: Session, step: int, own: State) -> State:
        """Raise a RuntimeError, because clients have no separate adapters to average."""
        raise RuntimeError("with this split.schedule, adapters are not averaged within a round")

    def state_of(self, client: str) -> State:
        """Return the body adapters, which are the same for every client."""
        return self.adapters.export()

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the adapters, which need not be averaged."""
        return self.adapters.export()

    def export_optimizers(self) -> dict[str, State]:
        """Return a dictionary with the state of the optimizer as its only item."""
        return {"body": self.adapters.export_optimizer()}

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Restore the state of the optimizer, or create a new optimizer if there is no state."""
        self.adapters.load_optimizer(states.get("body", {}))


class Serial(SharedAdapters):
    """Schedule with one set of adapters and one optimizer, used by one client at a time."""

    def __init__(self, adapters: BodyAdapters) -> None:
        super().__init__(adapters)
        self._turn = ""
        self._before: tuple[State, State] = ({}, {})
        self._lock = threading.Lock()

    def join(self, session: Session, plan: RoundPlan) -> SeparateTrainer:
        """Begin a client's turn; raise a RuntimeError if another client's turn has not ended."""
        client = session.account.client
        with self._lock:
            if self._turn:
                raise RuntimeError(f"{client} can't begin before {self._turn}'s turn has ended")
            self._turn = client
        self._before = self.adapters.export(), self.adapters.export_optimizer()
        return SeparateTrainer(session, self.adapters, plan)

    def mark_absent(self, client: str) -> None:
        """Do nothing, because no client waits for another."""

    def leave(self, client: str, finished: bool) -> None:
        """End a client's turn; if it has not finished, restore the adapters and the optimizer."""
        state, optimizer = self._before
        if not finished:
            self.adapters.load(state)
            self.adapters.load_optimizer(optimizer)
        with self._lock:
            self._turn = ""
