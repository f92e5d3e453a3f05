"""The interface of a schedule."""

from collections.abc import Mapping
from typing import Protocol

import torch

from finetuning.adapters.adapter import State
from finetuning.training.optimization import OptimizerState
from split.protocol.training import HeadOutput, OutputGradient, RoundPlan, StepEnd
from split.server.session import Session


class ClientTrainer(Protocol):
    """Computes a client's micro-batches: separately, or stacked with those of others.

    The methods are called from the lane's thread in the order of the client's frames; answers are
    sent over the lane.
    """

    def forward(self, output: HeadOutput) -> None:
        """Compute a micro-batch, and answer with its hidden states."""
        ...

    def backward(self, gradient: OutputGradient) -> None:
        """Backpropagate the gradient of a micro-batch's output; answer with that of its input."""
        ...

    def step(self, end: StepEnd) -> None:
        """End a step: answer with factor and norm, and take the body's optimizer step."""
        ...

    def waits(self) -> bool:
        """Whether it is not the client's turn to send a frame."""
        ...

    def holds(self) -> bool:
        """Whether the client holds room in the activation budget, for which others may wait."""
        ...

    def leave(self) -> None:
        """Drop an unfinished step."""
        ...


class Schedule(Protocol):
    """How clients share the body: ``Serial``, ``ClientBatch`` or ``Hierarchical``."""

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Prepare for the clients that may join."""
        ...

    def begin_with(self, own: Mapping[str, torch.Tensor]) -> None:
        """Set the adapters of heads and tails with which all clients begin the round."""
        ...

    def join(self, session: Session, plan: RoundPlan) -> ClientTrainer:
        """Begin a client's round."""
        ...

    def leave(self, client: str, finished: bool) -> None:
        """End a client's round, finished or not."""
        ...

    def mark_absent(self, client: str) -> None:
        """Stop waiting for a client that won't join."""
        ...

    def average(self, session: Session, step: int, own: State) -> State:
        """Average all parties' adapters within a round."""
        ...

    def state_of(self, client: str) -> State:
        """Return the body's adapters of a client."""
        ...

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the body's adapters that the next round begins with."""
        ...

    @property
    def scaled(self) -> dict[str, float]:
        """Clients of the round whose adapters were scaled down, each with the smallest factor."""
        ...

    def export_optimizers(self) -> dict[str, OptimizerState]:
        """Return the optimizers' states by their keys."""
        ...

    def load_optimizers(self, states: Mapping[str, OptimizerState]) -> None:
        """Restore the optimizers' states."""
        ...
