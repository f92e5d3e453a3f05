"""The server's state machine that converts the frames of a round of training into events.

The configuration and the client's number of examples limit all counts that the client sends. A
frame that is not consistent with earlier frames raises ``ProtocolError``.
"""

from dataclasses import dataclass, replace

import torch

from split.protocol.errors import ProtocolError
from split.protocol.frames import Frame, Kind, Padding, check_size, read_hidden, read_whole_number

# Maximum of a squared norm, small enough for a finite sum over all clients.
_MAX_SQUARED_NORM = 1e30
_NUMBERS = "steps", "first_step", "total_steps"  # of a ``RoundPlan``, in JOIN


@dataclass(frozen=True)
class RoundPlan:
    """The plan of a client's round of training."""

    steps: int  # number of optimizer steps in the round
    first_step: int  # number of optimizer steps in the client's earlier rounds
    total_steps: int  # number of optimizer steps in all rounds of the run
    seed: int  # seed of the client's training in the round
    wants_gradient: bool = True  # whether the client's head has trainable weights


@dataclass(frozen=True)
class RoundLimits:
    """Limits that apply to every client of a round."""

    window: int  # maximum number of micro-batches that a client may have in flight
    activation_budget: int  # maximum padded tokens whose activations are in memory at once
    lanes: int  # number of clients that share the activation budget
    columns_before: int  # number of prefix positions before the tokens of each row
    micro_batches: int  # maximum number of micro-batches in a step of a client
    rows: int  # maximum number of rows of all micro-batches in a step of a client

    def credits(self, max_batch_tokens: int) -> int:
        """Return how many micro-batches of this size, in padded tokens, may be in flight.

        Raise a ProtocolError if one such micro-batch exceeds the activation budget.
        """
        if max_batch_tokens > self.activation_budget:
            raise ProtocolError(
                f"a micro-batch of {max_batch_tokens} padded tokens is larger than "
                f"split.activation-budget = {self.activation_budget}; raise this limit, or lower "
                "train.batch-size, data.max-length or adapter.prefix-length"
            )
        return max(
            1, min(self.window, self.activation_budget // (self.lanes * max(1, max_batch_tokens)))
        )


@dataclass(frozen=True)
class HeadOutput:
    """The head's output for a micro-batch, and the counts that were sent with it."""

    step: int  # step of the round, counted from 0
    index: int  # index of the micro-batch in the step
    hidden: torch.Tensor  # (rows, columns, hidden)
    padding: Padding
    columns_before: int  # number of prefix positions before the tokens of each row
    targets: int  # number of predicted tokens in the micro-batch
    step_targets: int  # number of predicted tokens in the whole step
    micro_batches: int  # number of micro-batches in the step

    @property
    def padded_tokens(self) -> int:
        """Number of tokens including padding: rows × columns."""
        return self.hidden.shape[0] * self.hidden.shape[1]

    @property
    def budget_tokens(self) -> int:
        """Number of padded tokens taken from the activation budget, prefixes included."""
        return self.padded_tokens + self.hidden.shape[0] * self.columns_before


@dataclass(frozen=True)
class OutputGradient:
    """The gradient of the loss with respect to the body's output, (rows, columns, hidden)."""

    step: int
    index: int
    gradient: torch.Tensor


@dataclass(frozen=True)
class StepEnd:
    """The end of a step, with the squared norm of the gradients of the head and the tail."""

    step: int
    squared_norm: float


# A frame with adapters of the head and the tail requests their average over all clients.
TrainingEvent = HeadOutput | OutputGradient | StepEnd | Frame


class TrainingRound:
    """State machine that checks a client's frames. Don't call ``receive`` concurrently."""

    def __init__(self, max_plan: RoundPlan, limits: RoundLimits) -> None:
        self.plan = max_plan  # the client's plan; until it has joined, the upper limit
        self.credits = 0  # maximum number of the client's micro-batches in flight
        # Numbers of the step's micro-batches whose output was sent (set by any thread) and whose
        # gradient has arrived.
        self.answered = self.returned = 0
        self._limits = limits
        self._max_batch_tokens = 0
        self._step = 0
        # Shapes of this step's hidden states; empty between steps.
        self._shapes: list[torch.Size] = []
        self._announced = (0, 0)  # targets and micro-batches of the step
        self._rows = self._targets = 0

    def join(self, frame: Frame) -> None:
        """Check the client's first frame.

        Raise a ProtocolError if the frame is not ``JOIN``, or a number is larger than the client's
        number of examples allows.
        """
        if frame.kind is not Kind.JOIN:
            raise ProtocolError(f"a lane began with a {frame.kind.name} frame; expected JOIN")
        self._max_batch_tokens = read_whole_number(frame, "longest")
        self.credits = self._limits.credits(self._max_batch_tokens)
        max_plan = self.plan
        numbers = {name: read_whole_number(frame, name) for name in _NUMBERS}
        for name, value in numbers.items():
            if value > (limit := getattr(max_plan, name)):
                raise ProtocolError(
                    f"{name} = {value}, but the number of examples that the client reported when "
                    f"it joined the run allows {limit}; if its data has changed, it must join again"
                )
        wants_gradient = frame.fields.get("wants_gradient") is True
        plan = replace(max_plan, **numbers, wants_gradient=wants_gradient)
        if (
            plan.first_step * max_plan.steps != max_plan.first_step * plan.steps
            or plan.total_steps * max_plan.steps < max_plan.total_steps * plan.steps
        ):
            raise ProtocolError(
                f"first_step = {plan.first_step} and total_steps = {plan.total_steps} don't fit "
                f"a run with {plan.steps} steps in every round"
            )
        # The body's learning rate must not depend on numbers that a client reports.
        self.plan = replace(plan, first_step=max_plan.first_step, total_steps=max_plan.total_steps)

    def receive(self, frame: Frame) -> TrainingEvent | None:
        """Check the next frame; return its event, or None for ``END``.

        Raise a ProtocolError if the frame is not allowed now, or contradicts earlier frames.
        """
        if frame.kind is Kind.END:
            if self._shapes or self._step != self.plan.steps:
                raise ProtocolError(
                    f"the round ended after {self._step} of {self.plan.steps} steps"
                )
            return None
        if frame.step != self._step:
            raise ProtocolError(f"received a frame of step {frame.step} in step {self._step}")
        if frame.kind is Kind.HIDDEN:
            return self._head_output(frame)
        if frame.kind is Kind.GRADIENT:
            return self._output_gradient(frame)
        if frame.kind is Kind.STEP:
            return self._step_end(frame)
        if frame.kind is not Kind.AVERAGE:
            raise ProtocolError(f"a {frame.kind.name} frame is not allowed in training")
        if self._shapes:
            raise ProtocolError("an average was requested within a step")
        return frame

    def _head_output(self, frame: Frame) -> HeadOutput:
        index = frame.micro_batch
        if frame.step >= self.plan.steps:
            raise ProtocolError(f"the round has only {self.plan.steps} steps")
        if index != len(self._shapes):
            raise ProtocolError(f"received micro-batch {index}; expected {len(self._shapes)}")
        if index - self.returned >= self.credits:
            raise ProtocolError(f"more than {self.credits} micro-batches are in flight")
        hidden, padding = read_hidden(frame)
        if padding.side != "right":
            raise ProtocolError("padding in training must be on the right, not on the left")
        output = HeadOutput(
            step=frame.step,
            index=index,
            hidden=hidden,
            padding=padding,
            columns_before=self._limits.columns_before,
            targets=read_whole_number(frame, "targets"),
            step_targets=read_whole_number(frame, "step_targets"),
            micro_batches=read_whole_number(frame, "micro_batches"),
        )
        self._count(output)
        self._shapes.append(hidden.shape)
        return output

    def _count(self, output: HeadOutput) -> None:
        """Check the counts of the next micro-batch, and add them to those of the step."""
        limits, index = self._limits, output.index
        announced = (output.step_targets, output.micro_batches)
        size = output.budget_tokens
        if size > self._max_batch_tokens:
            raise ProtocolError(
                f"received {size} padded tokens; at most {self._max_batch_tokens} were agreed on"
            )
        if index >= output.micro_batches or not output.targets:
            raise ProtocolError(
                f"micro-batch {index} does not fit a step of (targets, micro-batches) = {announced}"
            )
        if index and announced != self._announced:
            raise ProtocolError(
                f"a step's (targets, micro-batches) changed from {self._announced} to {announced}"
            )
        if output.micro_batches > limits.micro_batches:
            raise ProtocolError(
                f"received a step of {output.micro_batches} micro-batches; train.accumulation "
                f"allows {limits.micro_batches}"
            )
        tokens = int(output.padding.lengths.sum())
        if output.targets > tokens:
            raise ProtocolError(f"a micro-batch of {tokens} tokens has {output.targets} targets")
        self._announced = announced
        self._rows += output.hidden.shape[0]
        self._targets += output.targets
        if self._rows > limits.rows:
            raise ProtocolError(
                f"received a step of {self._rows} rows; train.batch-size × train.accumulation "
                f"allows {limits.rows}"
            )
        # The number of targets can be verified only at the last micro-batch. Until then, check it
        # against the maximum number of targets in the remaining micro-batches.
        to_come = (output.micro_batches - index - 1) * self._max_batch_tokens
        if not self._targets <= output.step_targets <= self._targets + to_come:
            raise ProtocolError(
                f"a step of {output.step_targets} announced targets has {self._targets} after "
                f"{index + 1} of {output.micro_batches} micro-batches"
            )

    def _output_gradient(self, frame: Frame) -> OutputGradient:
        index, gradient = frame.micro_batch, frame.tensors["gradient"]
        if index >= self.answered:
            raise ProtocolError(f"received gradient {index} before the output was sent")
        if index != self.returned:
            raise ProtocolError(f"received gradient {index}; expected {self.returned}")
        if gradient.shape != self._shapes[index]:
            raise ProtocolError(f"a gradient has shape {tuple(gradient.shape)}, not its output's")
        check_size(gradient, "gradient")
        self.returned += 1
        return OutputGradient(frame.step, index, gradient)

    def _step_end(self, frame: Frame) -> StepEnd:
        norm = frame.fields.get("squared_norm")
        is_number = isinstance(norm, int | float) and not isinstance(norm, bool)
        if not is_number or not 0 <= norm <= _MAX_SQUARED_NORM:  # type: ignore[operator]
            raise ProtocolError(f"squared_norm = {norm!r}; expected 0 to {_MAX_SQUARED_NORM:g}")
        if not self._shapes or not self.returned == len(self._shapes) == self._announced[1]:
            raise ProtocolError("a step ended before all its gradients were received")
        self._step += 1
        self.answered = self.returned = self._rows = self._targets = 0
        self._shapes.clear()
        return StepEnd(frame.step, float(norm))  # type: ignore[arg-type]
