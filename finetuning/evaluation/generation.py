"""Generate text from prompts, with a whole or a split model."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from finetuning.data.batching import micro_batches
from finetuning.data.tokenization import end_marks
from finetuning.model.interface import TextModel

GREEDY: Mapping[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def sampling(temperature: float, top_p: float) -> Mapping[str, Any]:
    """Return the arguments of ``generate`` for a temperature; 0 selects greedy decoding.

    ``top_p`` is the total probability of the most likely tokens to sample from (nucleus sampling).
    """
    if not temperature:
        return GREEDY
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}


def generate_texts(
    model: TextModel,
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

    Each prompt, (tokens,) int64, is continued by at most ``max_new`` tokens. A batch has at most
    ``batch_size`` prompts and ``max_tokens`` padded tokens, including prefix and new tokens; a
    longer prompt is a batch by itself. ``settings`` are arguments of ``generate``; see `GREEDY` and
    `sampling`. ``before_batch`` is called with the number of each batch before it is processed, and
    ``finished`` with the batch's number of prompts after it is processed.

    The texts contain no special tokens. With ``exactly``, the chat template's end mark doesn't end
    a text, and surrounding whitespace isn't removed.
    """
    if not exactly:
        # A base model's template can use an end mark other than the checkpoint's (`<|im_end|>`).
        ends = sorted({*model.end_tokens, *end_marks(tokenizer)})
        settings = {**settings, "eos_token_id": ends or None}
    # Prompts are padded on the left, because new tokens are appended on the right.
    pad = functools.partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
    padding = tokenizer.pad_token_id
    columns = [model.columns_before + len(prompt) + max_new for prompt in prompts]
    texts = [""] * len(prompts)
    batches = micro_batches(range(len(prompts)), columns, max_tokens, max_rows=batch_size)
    for number, batch in enumerate(batches):
        before_batch(number)
        chosen = [prompts[index] for index in batch]
        tokens = pad(chosen, padding_value=padding)
        mask = pad([torch.ones_like(prompt) for prompt in chosen])
        output = model.generate(tokens, mask, max_new, pad_token_id=padding, **settings)
        new = tokenizer.batch_decode(output[:, tokens.shape[1] :], skip_special_tokens=True)
        for index, text in zip(batch, new, strict=True):
            texts[index] = text if exactly else text.strip()
        finished(len(batch))
    return texts
