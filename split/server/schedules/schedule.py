"""The interface of a schedule."""

from collections.abc import Mapping
from typing import Protocol

import torch

from finetuning.adapters.adapter import State
from finetuning.training.optimization import OptimizerState
from split.protocol.training import HeadOutput, OutputGradient, RoundPlan, StepEnd
from split.server.session import Session


class ClientTrainer(Protocol):
    """Computes the micro-batches of a client, either separately or stacked with those of others.

    The methods are called from the thread of the lane, in the order of the client's frames. Answers
    are sent over the lane.
    """

    def forward(self, output: HeadOutput) -> None:
        """Compute the forward pass of a micro-batch, and send its hidden states."""
        ...

    def backward(self, gradient: OutputGradient) -> None:
        """Compute the backward pass of a micro-batch, and send the gradient of its input."""
        ...

    def step(self, end: StepEnd) -> None:
        """End a step: send the clipping factor and the norm, and step the body's optimizer."""
        ...

    def waits(self) -> bool:
        """Return whether the server owes the client an answer, so that it need not send a frame."""
        ...

    def holds(self) -> bool:
        """Return whether the client occupies activation budget for which others may wait."""
        ...

    def leave(self) -> None:
        """Leave the round, and discard an unfinished step."""
        ...


class Schedule(Protocol):
    """Interface of ``Serial``, ``ClientBatch`` and ``Hierarchical``: how clients share the body."""

    def begin_round(self, weights: Mapping[str, float], keep_optimizers: bool, seed: int) -> None:
        """Prepare for the clients that may join."""
        ...

    def begin_with(self, own: Mapping[str, torch.Tensor]) -> None:
        """Set the adapters of head and tail with which all clients begin the round."""
        ...

    def join(self, session: Session, plan: RoundPlan) -> ClientTrainer:
        """Begin a client's round."""
        ...

    def leave(self, client: str, finished: bool) -> None:
        """End a client's round, whether it is finished or not."""
        ...

    def mark_absent(self, client: str) -> None:
        """Stop waiting for a client that will not join."""
        ...

    def average(self, session: Session, step: int, own: State) -> State:
        """Average the adapters of all parties within a round."""
        ...

    def state_of(self, client: str) -> State:
        """Return the body adapters of a client."""
        ...

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the body adapters with which the next round begins."""
        ...

    @property
    def scaled(self) -> dict[str, float]:
        """The smallest factor of each client whose adapters were scaled down in the round."""
        ...

    def export_optimizers(self) -> dict[str, OptimizerState]:
        """Return the states of the optimizers by key."""
        ...

    def load_optimizers(self, states: Mapping[str, OptimizerState]) -> None:
        """Restore the states of the optimizers."""
        ...
