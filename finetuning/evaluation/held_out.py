"""Evaluate a model on held-out examples: loss and perplexity."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from finetuning.data.batching import collate, micro_batches
from finetuning.data.tokenization import Example
from finetuning.model.interface import LossModel


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss on held-out examples."""

    loss: float  # mean over all target tokens, in nats
    perplexity: float  # exp(loss), where losses above 700 count as 700
    target_tokens: int  # number of target tokens


def held_out_loss(
    model: LossModel, examples: Sequence[Example], padding: int, batch_size: int
) -> HeldOutLoss:
    """Measure the loss without dropout; ``batch_size`` examples of maximum length fill a batch."""
    columns = [model.columns_before + len(example.tokens) for example in examples]
    batches = [
        collate([examples[i] for i in group], padding)
        for group in micro_batches(range(len(examples)), columns, batch_size * max(columns))
    ]
    targets = sum(len(batch.labels) for batch in batches)
    loss = sum(model.summed_losses(batches)) / targets
    return HeldOutLoss(loss, math.exp(min(loss, 700.0)), targets)
