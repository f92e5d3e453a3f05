"""A set of body adapters with its optimizer, and its training by a single client."""

import functools
import itertools
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

import torch

from finetuning.adapters.adapter import State, load_state
from finetuning.devices import to_device
from finetuning.randomness import derive_seed, drawing_from
from finetuning.settings import AdapterSettings, TrainSettings
from finetuning.training.optimization import (
    OptimizerState,
    export_optimizer,
    learning_rate,
    load_optimizer,
    make_optimizer,
    squared_norm,
)
from split.model.part import Activations
from split.protocol.frames import Kind, Padding
from split.protocol.training import HeadOutput, OutputGradient, RoundPlan, StepEnd
from split.server.compute import Priority
from split.server.interfaces import Body
from split.server.session import Session

# Prevents a division by 0, as in torch.nn.utils.clip_grad_norm_.
_TINY_NORM = 1e-6


_numbers = itertools.count()


class BodyAdapters:
    """The body with one set of adapters. Only the compute thread uses it.

    All sets of adapters share the frozen blocks. ``state`` contains the adapters' initial weights,
    keyed by name in the whole model.
    """

    def __init__(
        self,
        body: Body,
        adapter: AdapterSettings,
        train: TrainSettings,
        state: Mapping[str, torch.Tensor],
    ) -> None:
        self.name = f"adapters-{next(_numbers)}"
        self._body = body
        self._train = train
        body.attach(adapter, self.name)
        self.parameters = body.trainable(self.name)
        self.load(state)
        self._optimizer = make_optimizer(self.parameters, train)
        self._rate = functools.cache(partial(learning_rate, train))  # by number of steps in the run

    def run_blocks(
        self, hidden: torch.Tensor, padding: Padding, seed: int, grad: bool
    ) -> Future[Activations]:
        """Begin to compute the body's blocks in training mode. ``seed`` seeds dropout.

        If ``grad``, ``propagate_back`` returns the gradient for ``hidden``, (rows, columns,
        hidden).
        """
        # Make the leaf on the device: autograd would wait to copy the gradient of one on the CPU.
        leaf = to_device(hidden.detach(), self._body.device, self._body.dtype)
        leaf.requires_grad_(grad)
        self._body.use(self.name)
        self._body.train(True)
        with drawing_from(seed):
            return self._body.start(leaf, padding)

    def propagate_back(
        self, activations: Activations, gradient: torch.Tensor
    ) -> Future[torch.Tensor | None]:
        """Begin to add to the adapters' gradients; the result is that for ``hidden`` if wanted."""
        self._body.use(self.name)
        self._body.train(True)
        return self._body.propagate_back(activations, gradient)

    def discard(self, activations: Activations) -> None:
        """Free the activations of a forward pass whose gradient won't come."""
        self._body.discard(activations)

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor."""
        self._body.settle(self.name)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @torch.no_grad()
    def clip(self, others: float) -> tuple[float, float]:
        """Clip gradients to the maximum norm over all parties; a maximum of 0 disables clipping.

        ``others`` is the squared norm of the gradients of the client's head and tail. Return the
        factor, and the norm over all parties before clipping. Raise a FloatingPointError if the
        norm is not finite.
        """
        self._body.settle(self.name)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = (squared_norm(gradients) + others) ** 0.5
        if not norm < float("inf"):
            raise FloatingPointError(f"the gradient's norm is {norm}")
        factor = self.clip_factor(norm)
        if factor < 1:
            for gradient in gradients:
                gradient.mul_(factor)
        return factor, norm

    def clip_factor(self, norm: float) -> float:
        """Return the factor that clips gradients with this norm to the maximum norm."""
        max_norm = self._train.max_gradient_norm
        return min(1.0, max_norm / (norm + _TINY_NORM)) if max_norm else 1.0

    def step(self, index: int, total: int) -> None:
        """Take optimizer step ``index`` of ``total`` in the run, with the step's learning rate."""
        self._optimizer.param_groups[0]["lr"] = self._rate(total)(index)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def zero_grad(self) -> None:
        """Discard the gradients of an unfinished step, and the activations at stages."""
        self._body.forget(self.name)
        self._optimizer.zero_grad()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Set the weights of the adapters. The names must match exactly."""
        self._body.settle(self.name)
        load_state(self.parameters, state)

    def export(self) -> State:
        """Return a copy of the adapters' weights as float32 in CPU memory."""
        return {
            name: parameter.detach().to("cpu", torch.float32, copy=True)
            for name, parameter in self.parameters.items()
        }

    def export_optimizer(self) -> OptimizerState:
        """Return a copy of the optimizer's moments and step counts."""
        return export_optimizer(self._optimizer, self.parameters)

    def load_optimizer(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of the optimizer. With an empty state, create a new optimizer."""
        self._optimizer = make_optimizer(self.parameters, self._train)
        load_optimizer(self._optimizer, self.parameters, state)


class SeparateTrainer:
    """`Trainer` of body adapters that no other client uses at the same time."""

    def __init__(self, session: Session, adapters: BodyAdapters, plan: RoundPlan) -> None:
        self._session = session
        self._adapters = adapters
        self._plan = plan
        self._activations: dict[int, tuple[Activations, int]] = {}

    def accept_hidden(self, output: HeadOutput) -> None:
        """Run the blocks for a micro-batch as soon as the activation budget allows it."""
        self._session.put(Priority.FORWARD, partial(self._run_blocks, output), output.budget_tokens)

    def accept_gradient(self, gradient: OutputGradient) -> None:
        """Queue the backward pass of a micro-batch, which frees its activations."""
        self._session.put(Priority.BACKWARD, partial(self._propagate_back, gradient))

    def end_step(self, end: StepEnd) -> None:
        """Queue the step of the optimizer."""
        self._session.put(Priority.STEP, partial(self._take_step, end))

    def waits(self) -> bool:
        """Return False, because the session itself counts the queued jobs."""
        return False

    def leave(self) -> None:
        """Discard the activations and gradients of an unfinished step."""
        self._session.compute.withdraw(self._session)
        self._session.compute.call(self._clean)

    def _run_blocks(self, output: HeadOutput) -> None:
        self._session.passes.held += output.budget_tokens
        seed = derive_seed(
            "dropout", derive_seed(self._plan.seed, output.step), output.index, "body"
        )
        started = self._adapters.run_blocks(
            output.hidden, output.padding, seed, self._plan.wants_gradient
        )
        self._session.passes.when_complete(started, partial(self._answer, output))

    def _answer(self, output: HeadOutput, activations: Activations) -> None:
        self._activations[output.index] = (activations, output.budget_tokens)
        self._session.account.tokens += output.padded_tokens
        self._session.answer(output.step, output.index, activations.output)

    def _propagate_back(self, gradient: OutputGradient) -> None:
        activations, budget_tokens = self._activations.pop(gradient.index)
        started = self._adapters.propagate_back(activations, gradient.gradient)
        answer = partial(self._answer_gradient, gradient, budget_tokens)
        self._session.passes.when_complete(started, answer)

    def _answer_gradient(
        self, gradient: OutputGradient, budget_tokens: int, result: torch.Tensor | None
    ) -> None:
        self._session.passes.release(budget_tokens)
        if result is not None:
            tensors = {"gradient": result}
            self._session.lane.send(Kind.GRADIENT, gradient.step, gradient.index, tensors)

    def _take_step(self, end: StepEnd) -> None:
        """Clip the gradients by the norm over all parties, and take a step of the optimizer."""
        factor, norm = self._adapters.clip(end.squared_norm)
        # Answer before the optimizer takes its step, so that the client need not wait for it.
        self._session.lane.send(Kind.STEP, end.step, fields={"factor": factor, "norm": norm})
        self._adapters.step(self._plan.first_step + end.step, self._plan.total_steps)
        self._session.account.steps += 1

    def _clean(self) -> None:
        self._activations.clear()
        self._session.passes.release(self._session.passes.held)
        self._adapters.zero_grad()
