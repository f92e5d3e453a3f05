"""Micro-batches of all clients are stacked and run once (FL-GLM section 3.3, figure 3)."""

import threading
from collections.abc import Mapping

import torch

from finetuning.settings import SplitSettings
from split.server.body_adapters import BodyAdapters
from split.server.compute import ComputeThread
from split.server.head_output import HeadOutput
from split.server.round_plan import RoundPlan
from split.server.schedules.join_barrier import JoinBarrier
from split.server.schedules.shared_adapters import SharedAdapters
from split.server.session import Session
from split.server.stacked_micro_batch import Member
from split.server.stacked_round import StackedRound


class ClientBatch(SharedAdapters):
    """One set of adapters, and one optimizer step for all clients' micro-batches.

    Args:
        adapters: of the body.
        compute: runs the stacked micro-batches.
        split: the activation budget, and how long clients wait for each other.
        minimum: clients that must have joined when a round begins.

    """

    def __init__(
        self, adapters: BodyAdapters, compute: ComputeThread, split: SplitSettings, minimum: int
    ) -> None:
        super().__init__(adapters)
        self._compute = compute
        self._split = split
        self._changed = threading.Condition()
        self._barrier = JoinBarrier(self._changed, minimum, split.join_timeout)
        self._round: StackedRound

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Prepare for the clients that may join; see ``SharedAdapters.begin_round``."""
        super().begin_round(weights, keep_optimizers, seed)
        with self._changed:
            self._barrier.begin(weights)
            self._round = StackedRound(
                adapters=self._adapters, compute=self._compute, seed=seed, split=self._split
            )

    def join(self, session: Session, plan: RoundPlan) -> "StackedTrainer":
        """Add a client, and wait until all have joined.

        Args:
            session: of the client's lane.
            plan: its round.

        Raises:
            RuntimeError: the round began without it, or too few joined.

        """
        with self._changed:
            self._barrier.join(session.account.client)
            member = self._round.add(session, plan)
            try:
                self._barrier.wait(session.account.client)
            except RuntimeError:
                self._round.remove(member)
                raise
        return StackedTrainer(self._round, member)

    def leave(self, client: str, finished: bool) -> None:
        """Do nothing: the client's trainer has left the round."""


class StackedTrainer:
    """Trains a client together with others; see ``ClientTrainer``."""

    def __init__(self, stacked_round: StackedRound, member: Member) -> None:
        self._round = stacked_round
        self._member = member

    def forward(self, output: HeadOutput) -> None:
        """Compute a micro-batch when those of all others have come."""
        self._round.forward(self._member, output)

    def backward(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Use a micro-batch's gradient when those of all others have come."""
        self._round.backward(self._member, index, gradient)

    def step(self, step: int, squared_norm: float) -> None:
        """End a step when all others have."""
        self._round.step(self._member, squared_norm)

    def waits(self) -> bool:
        """Whether it is not the client's turn to send a frame; end the lanes of late clients."""
        return self._round.waits(self._member)

    def leave(self) -> None:
        """Leave the round."""
        self._round.remove(self._member)
