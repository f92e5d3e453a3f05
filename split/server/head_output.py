"""A client's micro-batch after its head."""

from dataclasses import dataclass

import torch

from split.model.part import Padding


@dataclass(frozen=True)
class HeadOutput:
    """Hidden states of a micro-batch, and the counts that came with them.

    Attributes:
        step: of the round, counted from 0.
        index: of the micro-batch in the step.
        hidden: (rows, columns, hidden).
        padding: of the rows.
        columns_before: columns that a prefix takes before each row's tokens.
        targets: tokens that the client predicts in the micro-batch.
        step_targets: tokens that it predicts in the whole step.
        micro_batches: of the client's step.

    """

    step: int
    index: int
    hidden: torch.Tensor
    padding: Padding
    columns_before: int
    targets: int
    step_targets: int
    micro_batches: int

    @property
    def padded_tokens(self) -> int:
        """Rows × columns."""
        return self.hidden.shape[0] * self.hidden.shape[1]

    @property
    def budget_tokens(self) -> int:
        """Padded tokens, prefixes included: what it takes of the activation budget."""
        return self.padded_tokens + self.hidden.shape[0] * self.columns_before
