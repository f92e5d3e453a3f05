"""Interfaces of a block server: its body, the schedule, and what trains the body for a client."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import torch

from finetuning.adapters.adapter import State
from finetuning.settings import AdapterSettings
from split.model.part import Activations, Part
from split.protocol.frames import Padding
from split.protocol.training import HeadOutput, OutputGradient, RoundPlan, StepEnd
from split.server.session import Session
from split.server.stage_client import StagedKeyValues


class Body(Protocol):
    """The server's blocks: a `Part` in this process, or a `StagedBody` on several hosts."""

    hidden_size: int
    dtype: torch.dtype
    device: torch.device  # of the inputs

    def attach(self, settings: AdapterSettings, name: str) -> None:
        """Add an adapter and use it."""

    def trainable(self, name: str) -> dict[str, torch.nn.Parameter]:
        """Return an adapter's weights, keyed by name in the whole model's saved adapter."""

    def remove(self, name: str) -> None:
        """Remove an adapter."""

    def use(self, name: str | None) -> None:
        """Select the adapter to compute with; None selects the base model without an adapter."""

    def train(self, mode: bool) -> None:
        """Turn dropout on or off."""

    def start(self, hidden: torch.Tensor, padding: Padding) -> Future[Activations]:
        """Begin a forward pass with the adapter in use.

        Passes begin in the order of calls, and each stage computes them in this order. Stages work
        on different passes at the same time; in one process, the result is complete.
        """

    def propagate_back(
        self, activations: Activations, gradient: torch.Tensor
    ) -> Future[torch.Tensor | None]:
        """Begin a backward pass with the adapter in use; add to the adapter's gradients.

        The result is the gradient for the input, (rows, columns, hidden), if it requires one.
        """

    def discard(self, activations: Activations) -> None:
        """Free the activations of a forward pass whose gradient won't come."""

    def settle(self, name: str) -> None:
        """Wait for an adapter's passes; raise the error of one that failed since ``forget``."""

    def forget(self, name: str) -> None:
        """Free the activations of an adapter's forward passes whose gradients won't come."""

    def with_cache(self) -> Part | Callable[[Padding, int], StagedKeyValues]:
        """Return the part whose `KeyValues` can be cached, or what begins a cache at stages."""

    def close(self) -> None:
        """Free the blocks on other hosts."""


@dataclass(frozen=True)
class RoundStart:
    """What a schedule needs to begin a round of training."""

    weights: Mapping[str, float]  # weight of each invited client in averages
    keeps_optimizers: bool  # whether optimizers keep their state between rounds
    seed: int  # seed of the round's dropout in the body
    # Adapters of the head and tail that all clients begin with, and the clients' caps on distances
    # (see `update_factors`); only for averages within the round.
    client_adapters: State | None = None
    caps: Mapping[str, float] = field(default_factory=dict)


class Trainer(Protocol):
    """Trains the body's adapters with one client in one round.

    The methods are called from the session's thread, in the order of the client's frames. Answers
    are sent over the lane.
    """

    def accept_hidden(self, output: HeadOutput) -> None:
        """Accept the hidden states of a micro-batch after the head."""

    def accept_gradient(self, gradient: OutputGradient) -> None:
        """Accept the gradient of a step's mean loss with respect to a micro-batch's output."""

    def end_step(self, end: StepEnd) -> None:
        """Accept the end of a step."""

    def waits(self) -> bool:
        """Return whether the client need not send a frame, because others must send theirs."""

    def leave(self) -> None:
        """Discard the activations and gradients of an unfinished step."""


class Schedule(Protocol):
    """How clients share the body's adapters (FL-GLM section 3.3)."""

    scaled: dict[str, float]  # smallest factor of each client that was scaled down in the round

    def begin_round(self, start: RoundStart) -> None:
        """Prepare a round that the clients in ``start.weights`` may join."""

    def join(self, session: Session, plan: RoundPlan) -> Trainer:
        """Add a client, and wait until it may train.

        Raise ``LaneError`` if the client's lane has ended. Raise ``RuntimeError`` if the client
        can't join now.
        """

    def mark_absent(self, client: str) -> None:
        """Stop waiting for a client that will not start the round."""

    def leave(self, client: str, finished: bool) -> None:
        """Remove a client; if it has not finished, undo its changes where that is possible."""

    def average(self, session: Session, step: int, own: State) -> State:
        """Return the average of the clients' adapters of the head and tail after a step.

        Raise ``RuntimeError`` if no average is due. Raise ``ProtocolError`` if the adapters ``own``
        are not those of the head and tail. Raise ``LaneError`` if the client's lane has ended.
        """

    def state_of(self, client: str) -> State:
        """Return the body adapters of a client."""

    def end_round(self, weights: Mapping[str, float]) -> State:
        """Return the body adapters that the next round begins with."""

    def export_optimizers(self) -> dict[str, State]:
        """Return the states of the optimizers, by client or for the shared adapters."""

    def load_optimizers(self, states: Mapping[str, State]) -> None:
        """Restore the states of the optimizers."""
