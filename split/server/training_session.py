"""The server's session for one client's round of training."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from split.lane.lane import Lane
from split.protocol.errors import LaneError, ProtocolError
from split.protocol.frames import Frame, Kind
from split.protocol.training import (
    HeadOutput,
    OutputGradient,
    RoundLimits,
    RoundPlan,
    StepEnd,
    TrainingRound,
)
from split.server.compute import ComputeThread
from split.server.interfaces import Schedule, Trainer
from split.server.session import Session
from split.settings import SplitSettings


class TrainingSession(Session):
    """Session of one client's round of training.

    ``max_plan`` limits the client's plan. The schedule determines the body's adapters and the
    clients to train with. See ``Session`` for the other arguments.
    """

    def __init__(
        self,
        lane: Lane,
        max_plan: RoundPlan,
        schedule: Schedule,
        compute: ComputeThread,
        limits: RoundLimits,
        split: SplitSettings,
        lifetime: float,
    ) -> None:
        super().__init__(lane, "train", compute, split, lifetime)
        self._schedule = schedule
        self._round = TrainingRound(max_plan, limits)
        self._trainer: Trainer | None = None

    @property
    def planned_steps(self) -> int:
        """Number of steps of the client's round; the maximum until the client has joined."""
        return self._round.plan.steps

    def serve(self) -> None:
        """Handle the client's frames until it ends its round.

        Raise ``LaneError`` if the lane has ended, or the client was silent for too long. Raise
        ``ProtocolError`` if the client sent a frame that is not allowed. Raise ``RuntimeError`` if
        the schedule rejected the client.
        """
        self._round.join(self.receive())
        trainer = self._trainer = self._schedule.join(self, self._round.plan)
        handlers: dict[type, Callable[[Any], None]] = {
            HeadOutput: trainer.accept_hidden,
            OutputGradient: trainer.accept_gradient,
            StepEnd: trainer.end_step,
            Frame: self._average,
        }
        finished = False
        try:
            self.lane.send(Kind.WELCOME, fields={"credits": self._round.credits})
            while (event := self._round.receive(self.receive())) is not None:
                if isinstance(event, StepEnd):
                    self._kept_in_step = 0.0
                handlers[type(event)](event)
            self._settle()
            self.lane.send(Kind.END)
            finished = True
        finally:
            self._trainer = None
            trainer.leave()
            self._schedule.leave(self.account.client, finished)
        with suppress(LaneError):  # wait until the client has received END and closes the lane
            self.receive()

    def answer(self, step: int, index: int, states: torch.Tensor) -> None:
        """Send the hidden states of a micro-batch, and accept the gradient for them from now on."""
        self._round.answered = index + 1
        super().answer(step, index, states)

    def waits(self) -> bool:
        """Return whether the client need not send a frame, because the server owes an answer."""
        waiting = (self._trainer is not None and self._trainer.waits()) or super().waits()
        # The client must send any outstanding gradient, even if jobs are queued.
        return waiting and self._round.answered <= self._round.returned

    def _average(self, request: Frame) -> None:
        self._settle()
        average = self._schedule.average(self, request.step, request.tensors)
        self.lane.send(Kind.AVERAGE, request.step, tensors=average)

    def _settle(self) -> None:
        """Wait for the current job, because a step is answered before the optimizer's step."""
        self.compute.call(lambda: None)
        if self.waits():
            raise ProtocolError("the client continued before its last step was computed")
