"""Generate text from prompts, with a whole or a split model."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from finetuning.data.tokenization import end_marks

GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


class Answering(Protocol):
    """Interface that generation requires of a whole or split model."""

    @property
    def columns_before(self) -> int:
        """Number of prefix positions before each row's tokens."""
        ...

    @property
    def end_tokens(self) -> list[int]:
        """The checkpoint's end-of-text tokens."""
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
        top_p: Total probability of the most likely tokens to sample from (nucleus sampling).

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
    """Continue prompts in batches of similar length; return the texts in the order of the prompts.

    Args:
        model: Model with its adapter.
        tokenizer: Tokenizer of the base model.
        prompts: (tokens,) int64 each.
        batch_size: Maximum number of prompts in a batch.
        max_new: Maximum number of tokens to generate per prompt.
        max_tokens: Maximum number of padded tokens in a batch, including prefix and new tokens; a
            longer prompt gets a batch of its own.
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
    # A base model's template can use an end mark other than the checkpoint's (Qwen: `<|im_end|>`).
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
        new: Maximum number of tokens to generate per prompt.
        most: Maximum number of padded tokens in a batch, including new ones. A longer prompt gets
            a batch of its own.

    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        # The first prompt of a batch is the longest.
        if batches and len(batches[-1]) < size:
            longest = lengths[batches[-1][0]] + new
            if (len(batches[-1]) + 1) * longest <= most:
                batches[-1].append(index)
                continue
        batches.append([index])
    return batches
