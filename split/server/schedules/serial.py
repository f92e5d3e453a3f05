"""Clients take turns with one set of body adapters (FL-GLM section 3.3, serial training)."""

import threading

from finetuning.adapters.adapter import State
from split.server.branch import Branch
from split.server.round_plan import RoundPlan
from split.server.schedules.one_branch import OneBranch
from split.server.seat import Alone
from split.server.session import Session


class Serial(OneBranch):
    """One set of adapters and one optimizer that pass from turn to turn.

    Args:
        branch: the adapters.

    """

    def __init__(self, branch: Branch) -> None:
        super().__init__(branch)
        self._turn = ""
        self._before: tuple[State, State] = ({}, {})
        self._lock = threading.Lock()

    def enter(self, session: Session, plan: RoundPlan) -> Alone:
        """Begin a client's turn.

        Args:
            session: of the client's lane.
            plan: its round.

        Raises:
            RuntimeError: another client's turn hasn't ended.

        """
        client = session.account.client
        with self._lock:
            if self._turn:
                raise RuntimeError(f"{client} came in {self._turn}'s turn, which has not ended")
            self._turn = client
        self._before = self._branch.export(), self._branch.export_optimizer()
        return Alone(session, self._branch, plan)

    def leave(self, client: str, finished: bool) -> None:
        """End a client's turn; one that broke off is taken back, as if it had never begun."""
        state, optimizer = self._before
        if not finished:
            self._branch.load(state)
            self._branch.load_optimizer(optimizer)
        with self._lock:
            self._turn = ""
