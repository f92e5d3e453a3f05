"""Evaluate a model on held-out examples: loss, perplexity and generated answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from finetuning.data.batching import MicroBatch, collate, micro_batches
from finetuning.data.tokenization import Example
from finetuning.evaluation.generation import GREEDY, Answering, continue_prompts


class Measured(Protocol):
    """The members that measuring a loss requires of a model, wherever its blocks are computed."""

    @property
    def columns_before(self) -> int:
        """Prefix positions before each row's tokens."""
        ...

    def summed_losses(self, batches: Sequence[MicroBatch]) -> list[float]:
        """Return each micro-batch's summed loss in nats, without dropout."""
        ...


@dataclass(frozen=True)
class HeldOutLoss:
    """Loss on held-out examples.

    Attributes:
        loss: Mean over all target tokens, in nats.
        perplexity: exp(loss).
        target_tokens: Number of tokens predicted.

    """

    loss: float
    perplexity: float
    target_tokens: int


def held_out_loss(
    model: Measured, examples: Sequence[Example], padding: int, batch_size: int
) -> HeldOutLoss:
    """Measure the loss without dropout, with ``batch_size`` of the longest examples at once."""
    columns = [model.columns_before + len(example.tokens) for example in examples]
    batches = [
        collate([examples[i] for i in group], padding)
        for group in micro_batches(range(len(examples)), columns, batch_size * max(columns))
    ]
    targets = sum(len(batch.labels) for batch in batches)
    loss = sum(model.summed_losses(batches)) / targets
    return HeldOutLoss(loss, math.exp(min(loss, 700.0)), targets)


def generate_answers(
    model: Answering, tokenizer: Any, prompts: Sequence[torch.Tensor], batch_size: int, max_new: int
) -> list[str]:
    """Answer prompts greedily; return the answers in their order.

    Args:
        model: Model with its adapter.
        tokenizer: Tokenizer of the base model.
        prompts: The prompts, (tokens,) int64 each.
        batch_size: Number of prompts answered at once.
        max_new: Maximum length of an answer, in tokens.

    """
    answers: dict[int, str] = {}
    # Prompts of similar length share a batch, which reduces padding.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        texts = continue_prompts(
            model=model,
            tokenizer=tokenizer,
            prompts=[prompts[index] for index in chosen],
            max_new=max_new,
            settings=GREEDY,
        )
        answers.update(zip(chosen, texts, strict=True))
    return [answers[index] for index in range(len(prompts))]
