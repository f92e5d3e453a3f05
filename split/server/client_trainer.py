"""Trains with the frames of one client, after its session has checked them."""

from typing import Protocol

import torch

from finetuning.randomness import derive_seed
from split.protocol.frames import Kind
from split.server.body_adapters import Activations, BodyAdapters
from split.server.compute import Priority
from split.server.head_output import HeadOutput
from split.server.round_plan import RoundPlan
from split.server.session import Session


class ClientTrainer(Protocol):
    """Computes a client's micro-batches: separately, or stacked with those of others.

    The methods are called from the lane's thread in the order of the client's frames; answers are
    sent over the lane.
    """

    def forward(self, output: HeadOutput) -> None:
        """Compute a micro-batch, and answer with its hidden states."""
        ...

    def backward(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of a micro-batch's output, and answer with that of its input."""
        ...

    def step(self, step: int, squared_norm: float) -> None:
        """End a step: answer with factor and norm, and take the body's optimizer step."""
        ...

    def waits(self) -> bool:
        """Whether it is not the client's turn to send a frame."""
        ...

    def leave(self) -> None:
        """Drop an unfinished step."""
        ...


class SeparateTrainer:
    """Trains adapters that no other client uses at the same time.

    Args:
        session: of the client's lane.
        adapters: of the body.
        plan: the client's round.

    """

    def __init__(self, session: Session, adapters: BodyAdapters, plan: RoundPlan) -> None:
        self._session = session
        self._adapters = adapters
        self._plan = plan
        self._activations: dict[int, tuple[Activations, int]] = {}
        self._held = 0  # padded tokens whose activations exist, or would if a job hadn't failed

    def forward(self, output: HeadOutput) -> None:
        """Compute a micro-batch as soon as the activation budget allows."""
        seed = derive_seed(
            "dropout", derive_seed(self._plan.seed, output.step), output.index, "body"
        )

        def forward() -> None:
            self._held += output.budget_tokens
            activations = self._adapters.forward(
                hidden=output.hidden,
                padding=output.padding,
                seed=seed,
                grad=self._plan.wants_gradient,
            )
            self._activations[output.index] = (activations, output.budget_tokens)
            self._session.account.tokens += output.padded_tokens
            self._session.answer(output.step, output.index, activations.output)

        self._session.put(Priority.FORWARD, forward, output.budget_tokens)

    def backward(self, step: int, index: int, gradient: torch.Tensor) -> None:
        """Compute a micro-batch's backward pass, which frees its activations."""

        def backward() -> None:
            activations, budget_tokens = self._activations.pop(index)
            self._release(budget_tokens)
            result = self._adapters.backward(activations, gradient)
            if result is not None:
                self._session.lane.send(Kind.GRADIENT, step, index, {"gradient": result})

        self._session.put(Priority.BACKWARD, backward)

    def step(self, step: int, squared_norm: float) -> None:
        """Clip over the client's parts and the body, and take the body's optimizer step."""

        def take_step() -> None:
            factor, norm = self._adapters.clip(squared_norm)
            # The client has its answer before the optimizer's work begins.
            self._session.lane.send(Kind.STEP, step, fields={"factor": factor, "norm": norm})
            self._adapters.step(self._plan.first_step + step, self._plan.total_steps)
            self._session.account.steps += 1

        self._session.put(Priority.STEP, take_step)

    def waits(self) -> bool:
        """Return False: the session counts the queued jobs itself."""
        return False

    def leave(self) -> None:
        """Drop the activations and gradients of an unfinished step."""
        self._session.compute.withdraw(self._session)
        self._session.compute.call(self._clean)

    def _clean(self) -> None:
        self._activations.clear()
        self._release(self._held)
        self._adapters.zero_grad()

    def _release(self, budget_tokens: int) -> None:
        self._held -= budget_tokens
        self._session.compute.release(budget_tokens)
