"""Micro-batches with the same index, one from each of several clients, stacked into one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from finetuning.devices import to_device
from split.model.part import Activations
from split.protocol.frames import Padding
from split.protocol.training import HeadOutput, RoundPlan
from split.server.schedules.gradient_cap import Addition
from split.server.session import Session


@dataclass(frozen=True)
class Gradient:
    """The gradient of the mean loss over a client's step with respect to a micro-batch's output."""

    tensor: torch.Tensor  # (rows, columns, hidden)
    size: float  # sum of the norms of the tokens' gradients


@dataclass(eq=False)
class Member:
    """A client whose micro-batches are stacked with those of other clients."""

    session: Session
    plan: RoundPlan
    # Micro-batches and gradients that have arrived but are not queued yet, by index.
    outputs: dict[int, HeadOutput] = field(default_factory=dict)
    gradients: dict[int, Gradient] = field(default_factory=dict)
    # State of the current step.
    micro_batches: int | None = None  # number of micro-batches; None until the first has arrived
    received: int = 0  # number of micro-batches that have arrived
    answered: int = 0  # number of micro-batches whose output was sent
    returned: int = 0  # number of micro-batches whose gradient has arrived
    finished: int = 0  # number of micro-batches whose backward pass is done
    squared_norm: float | None = None  # of head's and tail's gradients; None until the step ends

    @property
    def client(self) -> str:
        """The client's name."""
        return self.session.account.client

    @property
    def is_due(self) -> bool:
        """Whether it is the client's turn to send a frame."""
        if self.squared_norm is not None:
            return False
        return self.answered > self.returned or self.received == self.finished

    def needs(self, index: int) -> bool:
        """Return whether the current step has, or may have, a micro-batch with this index."""
        return self.micro_batches is None or self.micro_batches > index

    def begin_step(self) -> None:
        """Reset the state of the finished step."""
        self.micro_batches = self.squared_norm = None
        self.received = self.answered = self.returned = self.finished = 0


class StackedMicroBatch:
    """One micro-batch of each of several members, padded to the longest row and stacked.

    ``index`` is the index of the micro-batches in their steps, and ``number`` counts the passes
    with the same index from 0. ``parts`` are in the order of their rows.
    """

    def __init__(self, index: int, number: int, parts: Mapping[Member, HeadOutput]) -> None:
        self.index = index
        self.number = number
        self.parts = parts
        self.budget_tokens = _budget_tokens(parts)
        self.computed = False  # whether the forward pass is done
        # Set between the forward and the backward pass, unless all members had already left.
        self.activations: Activations | None = None

    def hidden(self) -> tuple[torch.Tensor, Padding]:
        """Return the stacked hidden states, (rows, columns, hidden), with zeros as padding."""
        rows, columns = _size(self.parts)
        first = next(iter(self.parts.values())).hidden
        stacked = torch.zeros(rows, columns, first.shape[2], dtype=first.dtype)
        for _, output, part in self.rows_of(stacked):
            part.copy_(output.hidden)
        lengths = torch.cat([output.padding.lengths for output in self.parts.values()])
        return stacked, Padding("right", lengths)

    def gradient(
        self, gradients: Mapping[Member, Gradient], factors: Mapping[str, float], like: torch.Tensor
    ) -> torch.Tensor:
        """Return the stacked gradients of the members' summed (not mean) losses.

        The gradients are scaled by the factors of the clients, and are 0 in the rows of members
        without a gradient. The result has the shape, data type and device of the output, ``like``.
        """
        stacked = torch.zeros_like(like)
        for member, output, part in self.rows_of(stacked):
            if member in gradients:
                scale = output.step_targets * factors[member.client]
                part.copy_(to_device(gradients[member].tensor, like.device, like.dtype) * scale)
        return stacked

    def additions(self, gradients: Mapping[Member, Gradient]) -> dict[str, Addition]:
        """Return the contributions of gradients to the body's gradient, keyed by client."""
        additions = {}
        for member, gradient in gradients.items():
            part = self.parts[member]
            size = gradient.size * part.step_targets
            additions[member.client] = Addition(size, part.targets, part.step_targets)
        return additions

    def account(self, seconds: float) -> None:
        """Divide the time of a job among the members, in proportion to their tokens."""
        total = sum(output.padded_tokens for output in self.parts.values())
        for member, output in self.parts.items():
            share = output.padded_tokens / total
            member.session.account.seconds_computing += seconds * share

    def rows_of(self, stacked: torch.Tensor) -> Iterator[tuple[Member, HeadOutput, torch.Tensor]]:
        """Yield each member, its micro-batch, and a view of its rows and columns."""
        first = 0
        for member, output in self.parts.items():
            rows, columns = output.hidden.shape[:2]
            yield member, output, stacked[first : first + rows, :columns]
            first += rows


def stack(
    index: int, parts: Mapping[Member, HeadOutput], budget: int
) -> Iterator[StackedMicroBatch]:
    """Stack the micro-batches with the same index, in as many passes as the budget requires.

    The budget counts the padded tokens of a pass, prefixes included, because a stack of a few long
    rows and many short rows is mostly padding. Each micro-batch must fit into the budget.
    """
    number = 0
    chosen: dict[Member, HeadOutput] = {}
    for member, output in parts.items():
        if chosen and _budget_tokens({**chosen, member: output}) > budget:
            yield StackedMicroBatch(index, number, chosen)
            number, chosen = number + 1, {}
        chosen[member] = output
    yield StackedMicroBatch(index, number, chosen)


def _size(parts: Mapping[Member, HeadOutput]) -> tuple[int, int]:
    rows = sum(output.hidden.shape[0] for output in parts.values())
    return rows, max(output.hidden.shape[1] for output in parts.values())


def _budget_tokens(parts: Mapping[Member, HeadOutput]) -> int:
    rows, columns = _size(parts)
    before = max(output.columns_before for output in parts.values())  # equal for all parts
    return rows * (before + columns)
