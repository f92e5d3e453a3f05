"""Micro-batch j of several clients as one: whose rows are where."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from split.model.part import Padding
from split.server.branch import Graph
from split.server.round_plan import RoundPlan
from split.server.seat import Hidden
from split.server.session import Session


@dataclass(eq=False)
class Member:
    """A client in a stack.

    Attributes:
        session: of its lane.
        plan: its round.
        micro_batches: of its present step; None until the first of them has come.
        hidden: micro-batches that have come and are not stacked yet, by index.
        gradients: that have come and were not used yet, by index.
        squared_norm: of its head's and tail's gradients, when its step has ended.

    """

    session: Session
    plan: RoundPlan
    micro_batches: int | None = None
    hidden: dict[int, Hidden] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    squared_norm: float | None = None

    @property
    def client(self) -> str:
        """Its name."""
        return self.session.account.client

    def needs(self, index: int) -> bool:
        """Say whether a micro-batch of this index is still to come in this step, or may be."""
        return self.micro_batches is None or self.micro_batches > index


class Stacked:
    """One micro-batch of each of several members, padded to the longest and put together.

    Args:
        parts: in the order of their rows.

    Attributes:
        places: padded tokens and the prefix's places: what it takes of the activation budget.
        graph: between its forward and its backward pass.

    """

    def __init__(self, parts: Mapping[Member, Hidden]) -> None:
        self.parts = parts
        self._rows = sum(hidden.states.shape[0] for hidden in parts.values())
        self._columns = max(hidden.states.shape[1] for hidden in parts.values())
        before = max(hidden.columns_before for hidden in parts.values())  # the same for all
        self.places = self._rows * (before + self._columns)
        self.graph: Graph | None = None

    def states(self) -> tuple[torch.Tensor, Padding]:
        """Give (rows, columns, hidden) of all; what is padded is zero, on the right."""
        first = next(iter(self.parts.values())).states
        together = torch.zeros(self._rows, self._columns, first.shape[2], dtype=first.dtype)
        for _, hidden, rows in self.rows_of(together):
            rows.copy_(hidden.states)
        lengths = torch.cat([hidden.padding.lengths for hidden in self.parts.values()])
        return together, Padding("right", lengths)

    def gradient(
        self, gradients: Mapping[Member, torch.Tensor], like: torch.Tensor
    ) -> torch.Tensor:
        """Put the members' gradients together, each from the mean over its client's step to a sum.

        Rows of members that gave none are zero.
        """
        together = torch.zeros_like(like)
        for member, hidden, rows in self.rows_of(together):
            if member in gradients:
                rows.copy_(gradients[member].to(like) * hidden.step_targets)
        return together

    def rows_of(self, together: torch.Tensor) -> Iterator[tuple[Member, Hidden, torch.Tensor]]:
        """Give each member's part, and the view of its rows and columns."""
        first = 0
        for member, hidden in self.parts.items():
            rows, columns = hidden.states.shape[:2]
            yield member, hidden, together[first : first + rows, :columns]
            first += rows
