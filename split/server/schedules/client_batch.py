"""Schedule that stacks the micro-batches of all clients (FL-GLM section 3.3, figure 3)."""

import threading
from collections.abc import Mapping
from functools import partial

from finetuning.adapters.adapter import State
from split.protocol.training import RoundPlan
from split.server.body_adapters import BodyAdapters
from split.server.compute import ComputeThread
from split.server.schedules.join_barrier import JoinBarrier
from split.server.schedules.serial import SharedAdapters
from split.server.session import Session
from split.server.stacked_micro_batch import Member
from split.server.stacked_round import StackedRound
from split.settings import SplitSettings


class StackedTrainer:
    """Trains a client together with others; has the methods of ``SeparateTrainer``."""

    def __init__(self, stacked: StackedRound, member: Member) -> None:
        self.forward = partial(stacked.forward, member)
        self.backward = partial(stacked.backward, member)
        self.step = partial(stacked.step, member)
        self.waits = partial(stacked.waits, member)
        self.leave = partial(stacked.remove, member)

    def holds(self) -> bool:
        """Return False, because the round itself ends the lanes of late members."""
        return False


class ClientBatch(SharedAdapters):
    """Schedule with one set of adapters, and one optimizer step for all clients' micro-batches."""

    def __init__(
        self, adapters: BodyAdapters, compute: ComputeThread, split: SplitSettings, minimum: int
    ) -> None:
        super().__init__(adapters)
        self._compute = compute
        self._split = split
        self._changed = threading.Condition()
        self._barrier = JoinBarrier(self._changed, minimum, split.join_timeout)
        self.mark_absent = self._barrier.mark_absent
        self._round: StackedRound

    def begin_round(
        self,
        weights: Mapping[str, float],
        keep_optimizers: bool,
        seed: int,
        own: State | None,
        caps: Mapping[str, float] | None,
    ) -> None:
        """Prepare a round that the clients in ``weights`` may join."""
        super().begin_round(weights, keep_optimizers, seed, own, caps)
        with self._changed:
            self._barrier.begin(weights)
            self._round = StackedRound(
                adapters=self._adapters, compute=self._compute, seed=seed, split=self._split
            )

    def join(self, session: Session, plan: RoundPlan) -> StackedTrainer:
        """Add a client, and wait until all clients have joined or the join timeout has expired.

        Raise ``LaneError`` if the client's lane has ended. Raise ``RuntimeError`` if the round
        began without the client, or too few clients joined.
        """
        with self._changed:
            self._barrier.join(session.account.client)
            member = self._round.add(session, plan)
            try:
                self._barrier.wait(session.account.client, session.lane.check)
            except RuntimeError:
                self._round.remove(member)
                raise
        return StackedTrainer(self._round, member)

    def leave(self, client: str, finished: bool) -> None:
        """Do nothing, because the client's trainer has already left the round."""
