"""The interfaces that whole and split models have in common."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from finetuning.data.batching import MicroBatch
from finetuning.data.candidates import CandidateBatch


class PrefixedModel(Protocol):
    """A model that can have a prefix."""

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before each row's tokens."""


class TrainableModel(PrefixedModel, Protocol):
    """A model that computes the gradients of a training step."""

    def accumulate(self, batches: Sequence[MicroBatch], seed: int) -> list[float]:
        """Add the gradient of the mean loss per target; return each batch's summed loss in nats."""

    def clip(self, maximum: float) -> float:
        """Scale gradients down to the maximum norm (0: no limit); return the original norm."""


class LossModel(PrefixedModel, Protocol):
    """A model that computes losses on held-out rows."""

    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return each micro-batch's summed loss in nats, without dropout."""


class TextModel(PrefixedModel, Protocol):
    """A model that generates text and scores candidate answers."""

    @property
    def end_tokens(self) -> list[int]:
        """The checkpoint's end-of-text tokens."""

    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Continue prompts; see `finetuning.whole_model.WholeModel`."""

    def log_probabilities(
        self, batch: CandidateBatch, count: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return each target's log-probability in nats, and the likeliest tokens with theirs."""
