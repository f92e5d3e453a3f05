"""Generate text and compute candidate answers while the middle blocks are at a server."""

from collections.abc import Callable
from typing import Any

import torch

from finetuning.adapters.prefixes import prefix_cache
from finetuning.data.candidates import CandidateBatch
from finetuning.model.output_head import output_head
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.frames import Padding, Value

# Function that sends (number of exchanges so far, hidden states, lengths, fields) to the body and
# returns the hidden states after the body.
Exchange = Callable[[int, torch.Tensor, torch.Tensor, dict[str, Value]], torch.Tensor]


class Generation:
    """Text generation for one batch of prompts, whose hidden states pass through the body."""

    def __init__(self, head: Part, tail: Part, exchange: Exchange) -> None:
        self._head = head
        self._tail = tail
        self._exchange = exchange
        self._kept: tuple[KeyValues, KeyValues] | None = None
        self._sent = 0

    def run(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> Any:
        """Run ``generate`` on the checkpoint's own model class.

        The logits processors, sampling and stopping criteria of ``generate`` apply. The model that
        ``generate`` calls is the tail's output head, preceded by the three parts. See
        ``WholeModel.generate`` for the arguments. Return prompts and answers, (rows, columns + new
        tokens), or what ``settings`` request.
        """
        columns = mask.shape[1]
        padding = columns - mask.sum(dim=1).cpu()

        def compute(ids: torch.Tensor, _: None) -> tuple[torch.Tensor, Any]:
            return self._forward(ids, padding, columns + new_tokens), self._cache()

        device = self._tail.device
        return output_head(self._tail.model, compute).generate(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            **settings,
        )

    def _forward(self, tokens: torch.Tensor, padding: torch.Tensor, most: int) -> torch.Tensor:
        """Extend the caches; return (rows, columns, hidden), the output of the last block and norm.

        ``tokens`` are the prompts, (rows, columns), or the next token of each row. Some
        architectures recompute texts that exceed the trained length: they pass all tokens of the
        texts, which starts a new generation. Raise a ValueError for any other number of tokens.
        ``padding`` is the number of padding columns before each prompt, (prompts,), and ``most``
        the maximum number of columns of the texts.
        """
        rows, columns = tokens.shape
        # The rows of several texts that continue the same prompt are adjacent.
        padding = padding.repeat_interleave(rows // len(padding))
        fields: dict[str, Value] = {"side": "left"}
        if self._kept is None or columns == self._kept[0].columns + 1:
            lengths = columns - padding
            left = Padding("left", lengths)
            self._kept = KeyValues(self._head, left, columns), KeyValues(self._tail, left, columns)
            self._sent = 0
            fields["new_tokens"] = most - columns
        elif columns == 1:
            lengths = torch.ones_like(padding)
        else:
            raise ValueError(f"generation continued with {columns} tokens per row; expected 1")
        head, tail = self._kept
        hidden = self._exchange(self._sent, head.extend(tokens), lengths, fields)
        self._sent += 1
        return tail.extend(hidden)

    def _cache(self) -> Any:
        """Return the head's cache, from which ``generate`` reads the number of positions."""
        assert self._kept is not None
        head = self._kept[0]
        if head.cache is not None:
            return head.cache
        # A head without blocks has no cache. Return an empty cache of the right length.
        config = self._head.model.config
        return prefix_cache(
            prefixes={}, length=head.length, config=config, rows=1, dtype=self._head.dtype
        )


def hidden_of_candidates(
    head: Part, tail: Part, batch: CandidateBatch, exchange: Exchange
) -> torch.Tensor:
    """Compute each beginning once, then its endings with the beginning's keys and values.

    Return the states after the last block and norm, (positions, hidden): all beginnings, then all
    endings.
    """
    lengths, columns = batch.beginning_lengths, batch.beginnings.shape[1]
    padding = Padding("left", lengths)
    first, last = (KeyValues(part, padding, columns) for part in (head, tail))
    before = head.columns_before
    # Number of tokens that the body must cache in addition to those of the beginnings.
    new_tokens = batch.tokens_kept(before) - before - columns
    fields: dict[str, Value] = {"side": "left", "new_tokens": new_tokens}
    hidden = exchange(0, first.extend(batch.beginnings), lengths, fields)
    computed = [last.extend(hidden).flatten(0, 1)]
    if batch.endings_each:
        for part in (first, last):
            part.repeat(batch.endings_each)
        fields = {"side": "right", "endings": batch.endings_each}
        hidden = exchange(1, first.extend(batch.endings), batch.ending_lengths, fields)
        computed.append(last.extend(hidden).flatten(0, 1))
    return torch.cat(computed)
