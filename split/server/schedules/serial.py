"""Schedule in which clients train one after another (FL-GLM section 3.3, serial training)."""

import threading

from finetuning.adapters.adapter import State
from split.protocol.training import RoundPlan
from split.server.body_adapters import BodyAdapters, SeparateTrainer
from split.server.schedules.shared_adapters import SharedAdapters
from split.server.session import Session


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
        self._before = self._adapters.export(), self._adapters.export_optimizer()
        return SeparateTrainer(session, self._adapters, plan)

    def mark_absent(self, client: str) -> None:
        """Do nothing, because no client waits for another."""

    def leave(self, client: str, finished: bool) -> None:
        """End a client's turn; if it has not finished, restore the adapters and the optimizer."""
        state, optimizer = self._before
        if not finished:
            self._adapters.load(state)
            self._adapters.load_optimizer(optimizer)
        with self._lock:
            self._turn = ""
