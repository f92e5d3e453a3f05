"""The stages of a step when the middle blocks are at a server (FL-GLM sections 3.1 and 3.3)."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from finetuning.adapters.adapter import load_state
from finetuning.data.batching import MicroBatch
from finetuning.data.candidates import CandidateBatch
from finetuning.model.output_head import (
    add_target_gradient,
    end_tokens,
    target_log_probabilities,
    target_loss,
)
from finetuning.randomness import derive_seed, drawing_from, drawing_nothing_new
from finetuning.training.optimization import squared_norm
from split.client.noise import add_noise
from split.lane.lane import Lane
from split.model.candidates import hidden_of_candidates
from split.model.generation import Generation
from split.model.part import Part
from split.protocol.errors import LaneError, LaneTimeoutError
from split.protocol.frames import Frame, Kind, Padding, Value
from split.protocol.training import RoundPlan

_OF_A_STEP = {Kind.HIDDEN, Kind.STEP, Kind.AVERAGE}


class SplitModel:
    """A model with head and tail in this process, and the body at the other end of a lane.

    Args:
        head: Embedding and first blocks, with its adapter.
        tail: Last blocks, norm and output head, with its adapter.
        lane: Lane to the block server, over which frames are sent.
        frame_timeout: Seconds to wait for the server's next frame.
        deadline: Until when to wait for room at the server, on ``time.monotonic``'s clock.
        noise: Standard deviation of the noise on hidden states that are sent, relative to the root
            mean square of each token's.

    Attributes:
        lane: What frames go over; the caller that opened it closes it.
        seconds_waiting: Time spent waiting for the server's frames.

    """

    def __init__(
        self,
        head: Part,
        tail: Part,
        lane: Lane,
        frame_timeout: float,
        deadline: float | None = None,
        noise: float = 0.0,
    ) -> None:
        self._head = head
        self._tail = tail
        self._output_head = tail.output_head
        self.lane = lane
        self.seconds_waiting = 0.0
        self._frame_timeout = frame_timeout
        self._deadline = deadline
        self._noise = noise
        self._credits = 1
        self._step = 0
        self._average_every = 0
        self._until = 0.0  # when the round is over

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The weights that the client trains, by their names in the whole model."""
        return self._head.trainable() | self._tail.trainable()

    @property
    def columns_before(self) -> int:
        """Positions that a prefix in use takes before each row's tokens."""
        return self._head.columns_before

    @property
    def end_tokens(self) -> list[int]:
        """Tokens at which the checkpoint ends a text."""
        return end_tokens(self._tail.model)

    def join(self, plan: RoundPlan, longest: int, deadline: float, average_every: int = 0) -> None:
        """Begin a round of training.

        Args:
            plan: Numbers of steps; the seed stays here, and the head says whether it is trained.
            longest: Padded tokens of the largest micro-batch, prefixes included.
            deadline: Deadline on ``time.monotonic``'s clock.
            average_every: Steps after which all parties' adapters are averaged; 0 for never.

        """
        self._step = 0
        self._average_every, self._until = average_every, deadline
        self.lane.send(
            Kind.JOIN,
            fields={
                "steps": plan.steps,
                "first_step": plan.first_step,
                "total_steps": plan.total_steps,
                "longest": longest,
                "wants_gradient": bool(self._head.trainable()),
            },
        )
        # Others may have to join first; the server limits the time for that.
        self._credits = self._welcomed(deadline)

    def choose(self, model: str, adapters: Mapping[str, torch.Tensor] | None) -> None:
        """Choose the model that is evaluated from now on.

        Args:
            model: The server's name for the model.
            adapters: Adapters of head and tail; None for none.

        """
        for part in (self._head, self._tail):
            part.use(None if adapters is None else "default")
        if adapters is not None:
            load_state(self.parameters, adapters)
        self.lane.send(Kind.JOIN, fields={"model": model})
        self._credits = self._welcomed(None)

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Add the gradient of a step's loss to the ``.grad`` of head and tail, and at the server.

        Micro-batches don't depend on each other, so as many are in flight as the server has given
        credits for. Each party adds their gradients in their order.

        Args:
            batches: The step's micro-batches.
            seed: Seed of the step; each party derives its own for every micro-batch.

        Returns:
            Each micro-batch's summed loss in nats.

        """
        self._average_if_due()
        targets = sum(len(batch.labels) for batch in batches)
        wants_gradient = bool(self._head.trainable())
        sent: dict[int, torch.Tensor] = {}
        losses = []
        self._set_up(training=True)

        def forward(index: int) -> None:
            counts = {
                "targets": len(batches[index].labels),
                "step_targets": targets,
                "micro_batches": len(batches),
            }
            with drawing_from(derive_seed("dropout", seed, index, "head")):
                hidden = self._forward_head(index, batches[index], counts)
            if wants_gradient:
                sent[index] = hidden

        def answer(frame: Frame) -> bool:
            index = frame.micro_batch
            if frame.kind is Kind.HIDDEN:
                received = _of_shape(frame, "hidden", self._shape(batches[index]))
                middle = received.to(self._tail.device).requires_grad_()
                with drawing_from(derive_seed("dropout", seed, index, "tail")):
                    hidden = self._tail(middle, _padding(batches[index]))
                    with self._tail.autocast():
                        losses.append(
                            add_target_gradient(
                                head=self._output_head,
                                hidden=hidden,
                                batch=batches[index],
                                scale=1 / targets,
                            )
                        )
                gradient = middle.grad
                assert gradient is not None  # every micro-batch has targets
                self.lane.send(
                    Kind.GRADIENT,
                    step=self._step,
                    micro_batch=index,
                    tensors={"gradient": gradient},
                )
                return not wants_gradient
            output = sent.pop(index)
            received = _of_shape(frame, "gradient", output.shape)
            with drawing_nothing_new():
                output.backward(received.to(output))  # type: ignore[no-untyped-call]
            return True

        self._pipeline(
            count=len(batches),
            forward=forward,
            answer=answer,
            also=Kind.GRADIENT if wants_gradient else None,
        )
        return [float(loss) for loss in losses]

    @torch.no_grad()
    def clip(self, maximum: float) -> float:
        """Scale the gradients by the server's factor, which bounds the norm over all parties.

        Args:
            maximum: Largest norm; the server has the same setting. 0 is no limit.

        Returns:
            The norm over all parties before that.

        """
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        fields: Mapping[str, Value] = {"squared_norm": squared_norm(gradients)}
        self.lane.send(Kind.STEP, self._step, fields=fields)
        # Others may be far behind; each has its own time limits.
        fields = self._receive(Kind.STEP, self._until).fields
        factor, norm = _number(fields, "factor", most=1.0), _number(fields, "norm")
        if maximum:
            for gradient in gradients:
                gradient.mul_(factor)
        self._step += 1
        return norm

    @torch.no_grad()
    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return each micro-batch's summed loss in nats, without dropout."""
        losses = []
        self._set_up(training=False)

        def answer(frame: Frame) -> bool:
            batch = batches[frame.micro_batch]
            received = _of_shape(frame, "hidden", self._shape(batch))
            hidden = self._tail(received.to(self._tail.device), _padding(batch))
            with self._tail.autocast():
                losses.append(target_loss(self._output_head, hidden, batch))
            return True

        self._pipeline(len(batches), lambda i: self._forward_head(i, batches[i], {}), answer)
        return [float(loss) for loss in losses]

    @torch.no_grad()
    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Continue prompts; see ``WholeModel.generate``."""
        self._set_up(training=False)
        generation = Generation(
            head=self._head,
            tail=self._tail,
            mask=mask,
            new_tokens=new_tokens,
            exchange=self._through_body,
        )
        output: torch.Tensor = generation.run(tokens, mask, settings)
        self.lane.send(Kind.STEP)
        return output

    @torch.no_grad()
    def log_probabilities(self, batch: CandidateBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute candidate answers; see ``WholeModel.log_probabilities``."""
        self._set_up(training=False)
        hidden = hidden_of_candidates(
            head=self._head, tail=self._tail, batch=batch, exchange=self._through_body
        )
        self.lane.send(Kind.STEP)
        chosen = hidden[batch.positions.to(hidden.device)]
        return target_log_probabilities(self._output_head, chosen, batch.labels)

    def end(self, until: float | None = None) -> None:
        """End the round or the evaluation, and wait until the server has confirmed it.

        Args:
            until: When to stop waiting, on ``time.monotonic``'s clock; None is ``frame_timeout``.

        Raises:
            LaneError: The lane has ended, or the server has not confirmed it in time.

        """
        self.lane.send(Kind.END)
        self._receive(Kind.END, until=until)
        self.lane.close()

    def _shape(self, batch: MicroBatch) -> torch.Size:
        return torch.Size((*batch.tokens.shape, self._head.hidden_size))

    def _set_up(self, training: bool) -> None:
        for part in (self._head, self._tail):
            part.train(training)

    def _forward_head(
        self, index: int, batch: MicroBatch, counts: Mapping[str, int]
    ) -> torch.Tensor:
        hidden = self._head(batch.tokens.to(self._head.device), _padding(batch))
        self.lane.send(
            Kind.HIDDEN,
            step=self._step,
            micro_batch=index,
            tensors={"hidden": self._with_noise(hidden.detach()), "lengths": batch.lengths},
            fields={"side": "right", **counts},
        )
        return hidden

    def _through_body(
        self, index: int, hidden: torch.Tensor, lengths: torch.Tensor, fields: dict[str, Value]
    ) -> torch.Tensor:
        tensors = {"hidden": self._with_noise(hidden), "lengths": lengths}
        self.lane.send(
            Kind.HIDDEN, step=self._step, micro_batch=index, tensors=tensors, fields=fields
        )
        # Generations of other clients may have to end before there is room for this one.
        frame = self._receive(Kind.HIDDEN, None if index else self._deadline, micro_batch=index)
        return _of_shape(frame, "hidden", hidden.shape)

    def _with_noise(self, hidden: torch.Tensor) -> torch.Tensor:
        return add_noise(hidden, self._noise) if self._noise else hidden

    def _pipeline(
        self,
        count: int,
        forward: Callable[[int], object],
        answer: Callable[[Frame], bool],
        also: Kind | None = None,
    ) -> None:
        """Keep as many micro-batches in flight as there are credits.

        Args:
            count: Number of micro-batches.
            forward: Computes and sends a micro-batch.
            answer: Takes a frame of one, and returns whether that was its last.
            also: Kind of a second answer to each.

        """
        begun = ended = 0
        due = {Kind.HIDDEN: 0, Kind.GRADIENT: 0}
        while ended < count:
            if begun < count and begun - ended < self._credits:
                forward(begun)
                begun += 1
            else:
                ended += answer(self._answer(due, also))

    def _average_if_due(self) -> None:
        """Load the average of all clients' adapters between two steps, where it is due."""
        if self._average_every and self._step and self._step % self._average_every == 0:
            own = {name: parameter.detach() for name, parameter in self.parameters.items()}
            self.lane.send(Kind.AVERAGE, self._step, tensors=own)
            average = self._receive(Kind.AVERAGE, self._until).tensors
            for name, parameter in self.parameters.items():
                _check_average(name, average.get(name), parameter)
            load_state(self.parameters, average)

    def _welcomed(self, until: float | None) -> int:
        credits = self._receive(Kind.WELCOME, until).fields.get("credits")
        if not isinstance(credits, int) or isinstance(credits, bool) or credits < 1:
            raise LaneError(f"the server gave {credits!r} credits")
        return min(credits, self.lane.limits.window)

    def _answer(self, due: dict[Kind, int], also: Kind | None) -> Frame:
        """Wait for the answer to a micro-batch; of each kind they come in order."""
        frame = self._receive(Kind.HIDDEN, also=also)
        if frame.micro_batch != due[frame.kind] or (
            frame.kind is Kind.GRADIENT and frame.micro_batch >= due[Kind.HIDDEN]
        ):
            raise LaneError(
                f"{frame.kind.name} came for micro-batch {frame.micro_batch}, and is due for "
                f"{due[frame.kind]}"
            )
        due[frame.kind] += 1
        return frame

    def _receive(
        self,
        kind: Kind,
        until: float | None = None,
        also: Kind | None = None,
        micro_batch: int | None = None,
    ) -> Frame:
        """Wait for a frame of a kind, of the present step.

        Args:
            kind: What is due.
            until: When to stop waiting, on ``time.monotonic``'s clock; None is ``frame_timeout``.
            also: Another kind that may come.
            micro_batch: The frame's, where only one can be due.

        Raises:
            LaneError: The lane has ended, no frame came in time, or one that is not due.

        """
        started = time.monotonic()
        timeout = self._frame_timeout if until is None else max(0.0, until - started)
        try:
            frame = self.lane.receive(timeout)
        except LaneTimeoutError:
            setting = "split.frame-timeout" if until is None else "round-timeout"
            raise LaneTimeoutError(
                f"the block server sent nothing for {timeout:.0f} s ({setting})"
            ) from None
        finally:
            self.seconds_waiting += time.monotonic() - started
        if frame.kind not in (kind, also):
            raise LaneError(f"the server sent a frame {frame.kind.name} where {kind.name} is due")
        step = self._step if kind in _OF_A_STEP else 0
        if frame.step != step or (micro_batch is not None and frame.micro_batch != micro_batch):
            raise LaneError(
                f"the server sent {frame.kind.name} of step {frame.step}, micro-batch "
                f"{frame.micro_batch}, in step {step}"
            )
        return frame


def _of_shape(frame: Frame, name: str, shape: torch.Size) -> torch.Tensor:
    tensor = frame.tensors[name]  # the lane has checked that it exists
    if tensor.shape != shape:
        raise LaneError(
            f"the server answered {tuple(shape)} hidden states with {tuple(tensor.shape)}"
        )
    return tensor


def _number(fields: Mapping[str, Value], name: str, most: float = math.inf) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= most:
        raise LaneError(f"the server ended a step with {name} = {value!r}")
    return float(value)


def _check_average(name: str, found: torch.Tensor | None, own: torch.Tensor) -> None:
    if found is None or found.dtype is not torch.float32 or found.shape != own.shape:
        raise LaneError(f"the server's average has no {name} of float32 {tuple(own.shape)}")


def _padding(batch: MicroBatch) -> Padding:
    return Padding("right", batch.lengths)
