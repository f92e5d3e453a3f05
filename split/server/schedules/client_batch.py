"""Schedule that stacks the micro-batches of all clients (FL-GLM section 3.3, figure 3)."""

import threading
from functools import partial

from split.protocol.training import RoundPlan
from split.server.body_adapters import BodyAdapters
from split.server.compute import ComputeThread
from split.server.interfaces import RoundStart
from split.server.schedules.join_barrier import JoinBarrier
from split.server.schedules.serial import SharedAdapters
from split.server.schedules.stacked_micro_batch import Member
from split.server.schedules.stacked_round import StackedRound
from split.server.session import Session
from split.settings import SplitSettings


class StackedTrainer:
    """`Trainer` of a client whose micro-batches are stacked with those of others."""

    def __init__(self, stacked: StackedRound, member: Member) -> None:
        self.accept_hidden = partial(stacked.accept_hidden, member)
        self.accept_gradient = partial(stacked.accept_gradient, member)
        self.end_step = partial(stacked.end_step, member)
        self.waits = partial(stacked.waits, member)
        self.leave = partial(stacked.remove, member)


class ClientBatch(SharedAdapters):
    """Schedule with one set of adapters, and one optimizer step for all clients' micro-batches."""

    def __init__(
        self, adapters: BodyAdapters, compute: ComputeThread, split: SplitSettings, minimum: int
    ) -> None:
        super().__init__(adapters)
        self._compute = compute
        self._split = split
        self._changed = threading.Condition()
        self.barrier = JoinBarrier(self._changed, minimum, split.join_timeout)
        self.mark_absent = self.barrier.mark_absent
        self._round: StackedRound

    def begin_round(self, start: RoundStart) -> None:
        """Prepare a round that the clients in ``start.weights`` may join."""
        super().begin_round(start)
        with self._changed:
            self.barrier.begin(start.weights)
            self._round = StackedRound(self.adapters, self._compute, start.seed, self._split)

    def join(self, session: Session, plan: RoundPlan) -> StackedTrainer:
        """Add a client, and wait until all clients have joined or the join timeout has expired."""
        with self._changed:
            self.barrier.join(session.account.client)
            member = self._round.add(session, plan)
            try:
                self.barrier.wait(session.account.client, session.lane.check)
            except RuntimeError:
                self._round.remove(member)
                raise
        return StackedTrainer(self._round, member)

    def leave(self, client: str, finished: bool) -> None:
        """Do nothing, because the client's trainer has already left the round."""
