"""One client's round of training at the block server: which frame it may send when."""

from contextlib import suppress
from dataclasses import replace

import torch

from split.lane.lane import Lane
from split.protocol.errors import LaneError
from split.protocol.frames import Frame, Kind
from split.server.client_trainer import ClientTrainer
from split.server.compute import ComputeThread
from split.server.head_output import HeadOutput
from split.server.round_plan import RoundLimits, RoundPlan, check_plan
from split.server.schedules.schedule import Schedule
from split.server.session import (
    ProtocolError,
    Session,
    check_size,
    hidden_of,
    whole_number,
)
from split.server.step_counts import StepCounts

# Squared, and small enough for a finite sum over all clients.
_LARGEST_NORM = 1e30


class TrainingSession(Session):
    """Serves one client's round of training.

    Args:
        lane: to the client; the handshake is over.
        largest: the largest plan that the client may join with.
        schedule: decides with whom the client trains which adapters.
        compute: runs the session's jobs.
        limits: of the round.
        frame_timeout: seconds to wait for the client's next frame.

    """

    def __init__(
        self,
        lane: Lane,
        largest: RoundPlan,
        schedule: Schedule,
        compute: ComputeThread,
        limits: RoundLimits,
        frame_timeout: float,
    ) -> None:
        super().__init__(lane, "train", compute, frame_timeout)
        self._largest = largest
        self._schedule = schedule
        self._limits = limits
        self._trainer: ClientTrainer
        self._joined = False
        self._step = 0
        self._shapes: list[torch.Size] = []  # of the hidden states received in this step
        self._returned = 0  # gradients received in this step
        self._counts: StepCounts

    def serve(self) -> None:
        """Answer frames until the client ends its round.

        Raises:
            LaneError: the lane broke, or the client was silent for too long.
            ProtocolError: the client sent something that it may not send now.
            RuntimeError: the schedule refuses the client.

        """
        join = self.receive()
        if join.kind is not Kind.JOIN:
            raise ProtocolError(f"a lane began with a frame {join.kind.name}")
        longest = whole_number(join, "longest")
        self._credits = self._limits.credits(longest)
        self._counts = StepCounts(self._limits, longest)
        plan = replace(
            self._largest,
            steps=whole_number(join, "steps"),
            first_step=whole_number(join, "first_step"),
            total_steps=whole_number(join, "total_steps"),
            wants_gradient=bool(join.fields.get("wants_gradient")),
        )
        check_plan(plan, self._largest)
        self._steps = plan.steps
        self._trainer = self._schedule.join(self, plan)
        self._joined, finished = True, False
        try:
            self.lane.send(Kind.WELCOME, fields={"credits": self._credits})
            while (frame := self.receive()).kind is not Kind.END:
                self._take(frame)
            self._settle()
            finished = not self._shapes and self._step == self._steps and not super().waits()
            if not finished:
                raise ProtocolError(f"the round ended in step {self._step} of {self._steps}")
            self.lane.send(Kind.END)
        finally:
            self._joined = False
            self._trainer.leave()
            self._schedule.leave(self.account.client, finished)
        with suppress(LaneError):  # until the client has the end
            self.receive()

    def waits(self) -> bool:
        """Whether it is not the client's turn to send a frame."""
        waiting = (self._joined and self._trainer.waits()) or super().waits()
        # It is the client's turn while it has an unused answer, whatever else is queued.
        return waiting and self.answered <= self._returned

    def _settle(self) -> None:
        """Wait until the current job has ended: a step is answered before its optimizer's work."""
        self.compute.call(lambda: None)

    def _take(self, frame: Frame) -> None:
        if frame.step != self._step:
            raise ProtocolError(f"step {frame.step} came in step {self._step}")
        if frame.kind is Kind.HIDDEN:
            self._take_hidden(frame)
        elif frame.kind is Kind.GRADIENT:
            self._take_gradient(frame)
        elif frame.kind is Kind.STEP:
            self._take_step(frame)
        elif frame.kind is Kind.AVERAGE:
            if self._shapes:
                raise ProtocolError("an average was asked for within a step")
            self._settle()
            average = self._schedule.average(self, frame.step, dict(frame.tensors))
            self.lane.send(Kind.AVERAGE, frame.step, tensors=average)
        else:
            raise ProtocolError(f"a frame {frame.kind.name} came in a round of training")

    def _take_hidden(self, frame: Frame) -> None:
        index = frame.micro_batch
        if frame.step >= self._steps:
            raise ProtocolError(f"the round was to have {self._steps} steps")
        if index != len(self._shapes):
            raise ProtocolError(f"micro-batch {index} came in the place of {len(self._shapes)}")
        if index - self._returned >= self._credits:
            raise ProtocolError(f"more than {self._credits} micro-batches are under way")
        states, padding = hidden_of(frame)
        check_size(states, "hidden")
        output = HeadOutput(
            step=frame.step,
            index=index,
            hidden=states,
            padding=padding,
            columns_before=self._limits.columns_before,
            targets=whole_number(frame, "targets"),
            step_targets=whole_number(frame, "step_targets"),
            micro_batches=whole_number(frame, "micro_batches"),
        )
        self._counts.add(output)
        self._shapes.append(states.shape)
        self._trainer.forward(output)

    def _take_gradient(self, frame: Frame) -> None:
        index = frame.micro_batch
        gradient = frame.tensors["gradient"]
        if index != self._returned or index >= self.answered:
            raise ProtocolError(f"the gradient of micro-batch {index} came in the wrong place")
        if gradient.shape != self._shapes[index]:
            raise ProtocolError(f"a gradient of shape {tuple(gradient.shape)} came")
        check_size(gradient, "gradient")
        self._returned += 1
        self._trainer.backward(frame.step, index, gradient)

    def _take_step(self, frame: Frame) -> None:
        squared_norm = frame.fields.get("squared_norm")
        if (
            isinstance(squared_norm, bool)
            or not isinstance(squared_norm, int | float)
            or not 0 <= squared_norm <= _LARGEST_NORM
        ):
            raise ProtocolError(f"a step ended with squared_norm = {squared_norm!r}")
        if not self._counts.complete or self._returned < len(self._shapes):
            raise ProtocolError("a step ended before all its gradients came")
        self._step += 1
        self._returned = self.answered = 0
        self._shapes.clear()
        self._counts.begin()
        self._trainer.step(frame.step, float(squared_norm))
