"""Micro-batches of all clients are stacked and run once (FL-GLM section 3.3, figure 3)."""

import threading
from collections.abc import Mapping

import torch

from split.server.branch import Branch
from split.server.compute import ComputeThread
from split.server.round_plan import RoundPlan
from split.server.schedules.joining import Joining
from split.server.schedules.one_branch import OneBranch
from split.server.seat import Hidden
from split.server.session import Session
from split.server.stack import Stack
from split.server.stacked import Member


class ClientBatch(OneBranch):
    """One set of adapters, and one optimizer step for all clients' micro-batches.

    Args:
        branch: the adapters.
        compute: runs the stacks.
        activation_budget: padded tokens whose activations may exist at once.
        minimum: clients who must have joined when a round begins.
        join_timeout: seconds that clients wait for each other then.
        gather_timeout: seconds after which members that others wait for are left behind.

    """

    def __init__(
        self,
        branch: Branch,
        compute: ComputeThread,
        activation_budget: int,
        minimum: int,
        join_timeout: float,
        gather_timeout: float,
    ) -> None:
        super().__init__(branch)
        self._compute = compute
        self._activation_budget = activation_budget
        self._gather_timeout = gather_timeout
        self._changed = threading.Condition()
        self._joining = Joining(self._changed, minimum, join_timeout)
        self._stack: Stack

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Prepare a stack for the clients that may join; see ``OneBranch.begin_round``."""
        super().begin_round(weights, keep_optimizers, seed)
        with self._changed:
            self._joining.begin(weights)
            self._stack = Stack(
                self._branch, self._compute, seed, self._activation_budget, self._gather_timeout
            )

    def enter(self, session: Session, plan: RoundPlan) -> "Stacking":
        """Let a client join, and wait until all have.

        Args:
            session: of the client's lane.
            plan: its round.

        Raises:
            RuntimeError: the round began without it, or too few joined.

        """
        with self._changed:
            self._joining.join(session.account.client)
            member = self._stack.add(session, plan)
            try:
                self._joining.wait(session.account.client)
            except RuntimeError:
                self._stack.remove(member)
                raise
        return Stacking(self._stack, member)

    def leave(self, client: str, finished: bool) -> None:
        """Let a client go; its seat has left the stack."""


class Stacking:
    """A seat in a stack; see ``split.seat.Seat``."""

    def __init__(self, stack: Stack, member: Member) -> None:
        self._stack = stack
        self._member = member

    def forward(self, hidden: Hidden) -> None:
        """Compute a micro-batch when those of all others are there."""
        self._stack.forward(self._member, hidden)

    def backward(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Take a micro-batch's gradient, and use it when those of all others are there."""
        self._stack.backward(self._member, index, gradient)

    def step(self, step: int, squared_norm: float) -> None:
        """End a step when all others have."""
        self._stack.step(self._member, squared_norm)

    def waits(self) -> bool:
        """Say whether it is not the client's turn to send something; leave stragglers behind."""
        self._stack.leave_stragglers_behind()
        return self._stack.waits(self._member)

    def leave(self) -> None:
        """Leave the stack."""
        self._stack.remove(self._member)
