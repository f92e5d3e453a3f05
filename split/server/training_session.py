"""One client's round of training at the block server."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from split.lane.lane import Lane
from split.protocol.errors import LaneError, ProtocolError
from split.protocol.frames import Kind
from split.protocol.training import (
    AverageRequest,
    HeadOutput,
    OutputGradient,
    RoundLimits,
    RoundPlan,
    State,
    StepEnd,
    TrainingRound,
)
from split.server.compute import ComputeThread
from split.server.schedules.schedule import ClientTrainer, Schedule
from split.server.session import Session
from split.settings import SplitSettings


class TrainingSession(Session):
    """Serves one client's round of training.

    Args:
        lane: Lane to the client.
        largest: The largest plan that the client may join with.
        schedule: Decides with whom the client trains which adapters.
        compute: Runs the session's jobs.
        limits: Limits of the round.
        split: Time limits.
        lifetime: Seconds from its invitation to the end of the phase of the round.

    """

    def __init__(
        self,
        lane: Lane,
        largest: RoundPlan,
        schedule: Schedule,
        compute: ComputeThread,
        limits: RoundLimits,
        split: SplitSettings,
        lifetime: float,
    ) -> None:
        super().__init__(lane, "train", compute, split, lifetime)
        self._schedule = schedule
        self._round = TrainingRound(largest, limits)
        self._trainer: ClientTrainer | None = None

    @property
    def planned_steps(self) -> int:
        """Optimizer steps of the client's round; until it has joined, the most that are allowed."""
        return self._round.plan.steps

    def serve(self) -> None:
        """Answer frames until the client ends its round.

        Raises:
            LaneError: The lane has ended, or the client was silent for too long.
            ProtocolError: The client sent something that it may not send now.
            RuntimeError: The schedule refuses the client.

        """
        self._round.join(self.receive())
        trainer = self._trainer = self._schedule.join(self, self._round.plan)
        handlers: dict[type, Callable[[Any], None]] = {
            HeadOutput: trainer.forward,
            OutputGradient: trainer.backward,
            StepEnd: self._end_step,
            AverageRequest: self._average,
        }
        finished = False
        try:
            self.lane.send(Kind.WELCOME, fields={"credits": self._round.credits})
            self.dispatch(self._round.receive, handlers)
            self._settle()
            if self._round.state is not State.ENDED or super().waits():
                raise ProtocolError("the round ended before its last step was computed")
            self.lane.send(Kind.END)
            finished = True
        finally:
            self._trainer = None
            trainer.leave()
            self._schedule.leave(self.account.client, finished)
        with suppress(LaneError):  # until the client has the end
            self.receive()

    def answer(self, step: int, index: int, states: torch.Tensor) -> None:
        """Send the hidden states of a micro-batch; from now on their gradient may arrive."""
        self._round.answered = index + 1
        super().answer(step, index, states)

    def waits(self) -> bool:
        """Whether it is not the client's turn to send a frame."""
        waiting = (self._trainer is not None and self._trainer.waits()) or super().waits()
        # It is the client's turn while it has an unused answer, whatever else is queued.
        return waiting and self._round.answered <= self._round.returned

    def holds(self) -> bool:
        """Whether activations of the client's micro-batches exist that it alone can free."""
        return self._trainer is not None and self._trainer.holds()

    def _end_step(self, end: StepEnd) -> None:
        self._kept_in_step = 0.0
        assert self._trainer is not None
        self._trainer.step(end)

    def _average(self, request: AverageRequest) -> None:
        self._settle()
        average = self._schedule.average(self, request.step, request.adapters)
        self.lane.send(Kind.AVERAGE, request.step, tensors=average)

    def _settle(self) -> None:
        """Wait until the current job has ended: a step is answered before its optimizer's step."""
        self.compute.call(lambda: None)
