"""Generate text from prompts, wherever the model's blocks are computed."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from finetuning.data.tokenization import end_marks

GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class Answering(Protocol):
    """The members that answering requires of a model, wherever its blocks are computed."""

    @property
    def columns_before(self) -> int:
        """Columns that a prefix takes before each row's tokens."""
        ...

    @property
    def end_tokens(self) -> list[int]:
        """Tokens at which the checkpoint ends a text."""
        ...

    def generate(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> torch.Tensor:
        """Continue prompts; see `finetuning.model.whole_model.WholeModel`."""
        ...


def sampling(temperature: float, top_p: float) -> Mapping[str, Any]:
    """Return the arguments of ``generate`` for a temperature; 0 is greedy.

    Args:
        temperature: Divisor of the logits.
        top_p: Total probability of the likeliest tokens that are drawn from.

    """
    if not temperature:
        return GREEDY
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def generate_texts(
    model: Answering,
    tokenizer: Any,
    prompts: Sequence[torch.Tensor],
    batch_size: int,
    max_new: int,
    max_tokens: int = sys.maxsize,
    settings: Mapping[str, Any] = GREEDY,
    before_batch: Callable[[int], None] = lambda number: None,
    finished: Callable[[int], object] = lambda count: None,
    exactly: bool = False,
) -> list[str]:
    """Continue prompts in batches of similar length; return the texts in the prompts' order.

    Args:
        model: Model with its adapter.
        tokenizer: Tokenizer of the base model.
        prompts: (tokens,) int64 each.
        batch_size: Maximum number of prompts in a batch.
        max_new: Maximum number of tokens to generate for each.
        max_tokens: Maximum number of padded tokens in a batch, with the prefix and new ones; a
            longer prompt has a batch of its own.
        settings: Arguments of ``generate``; see `GREEDY` and `sampling`.
        before_batch: Called with the number of each batch before it is computed.
        finished: Called with the number of prompts of each batch after it is computed.
        exactly: Whether to call `continue_exactly` instead of `continue_prompts`.

    """
    lengths = [model.columns_before + len(prompt) for prompt in prompts]
    texts = [""] * len(prompts)
    answer = continue_exactly if exactly else continue_prompts
    batches = batches_by_length(lengths=lengths, size=batch_size, new=max_new, most=max_tokens)
    for number, batch in enumerate(batches):
        before_batch(number)
        chosen = [prompts[index] for index in batch]
        answers = answer(model, tokenizer, chosen, max_new=max_new, settings=settings)
        for index, text in zip(batch, answers, strict=True):
            texts[index] = text
        finished(len(batch))
    return texts


def continue_prompts(
    model: Answering,
    tokenizer: Any,
    prompts: Sequence[torch.Tensor],
    max_new: int,
    settings: Mapping[str, Any],
) -> list[str]:
    """Continue one batch of prompts, each up to the end of an answer.

    Args:
        model: Model with its adapter.
        tokenizer: Tokenizer of the base model.
        prompts: (tokens,) int64 each.
        max_new: Maximum number of tokens to generate.
        settings: Arguments of ``generate``; see `GREEDY` and `sampling`.

    Returns:
        The continuation of each prompt as text, without special tokens and surrounding whitespace.

    """
    # Base models' templates can have an end mark that isn't the checkpoint's (Qwen's `<|im_end|>`).
    ends = sorted({*model.end_tokens, *end_marks(tokenizer)})
    texts = continue_exactly(
        model=model,
        tokenizer=tokenizer,
        prompts=prompts,
        max_new=max_new,
        settings={**settings, "eos_token_id": ends or None},
    )
    return [text.strip() for text in texts]


def continue_exactly(
    model: Answering,
    tokenizer: Any,
    prompts: Sequence[torch.Tensor],
    max_new: int,
    settings: Mapping[str, Any],
) -> list[str]:
    """Continue one batch of prompts, each up to the end of a text; keep all whitespace."""
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.full((len(prompts), width), tokenizer.pad_token_id)
    mask = torch.zeros_like(tokens)
    # Prompts are padded on the left, since text is appended on the right.
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    output = model.generate(tokens, mask, max_new, pad_token_id=tokenizer.pad_token_id, **settings)
    texts: list[str] = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    return texts


def batches_by_length(lengths: Sequence[int], size: int, new: int, most: int) -> list[list[int]]:
    """Group prompts of similar length, as lists of indices.

    Args:
        lengths: Lengths of the prompts, in tokens.
        size: Maximum number of prompts in a batch.
        new: Maximum number of tokens to generate for each.
        most: Maximum number of padded tokens in a batch, new ones included; each prompt fits alone.

    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first of a batch is its longest.
        if batches and len(batches[-1]) < size:
            longest = lengths[batches[-1][0]] + new
            if (len(batches[-1]) + 1) * longest <= most:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches
