"""Text generation and candidate answers with a model whose middle blocks are at a server."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

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
        self._parts: tuple[KeyValues, KeyValues]
        self._cache = _Positions()
        self._sent = 0

    def run(
        self, tokens: torch.Tensor, mask: torch.Tensor, new_tokens: int, **settings: Any
    ) -> Any:
        """Run ``generate`` of the checkpoint's model class on the three parts and the output head.

        Its logits processors, sampling, stopping criteria and drafts apply. See
        ``WholeModel.generate`` for the arguments. Return prompts and answers, (rows, columns + new
        tokens), or what ``settings`` request.
        """
        columns = mask.shape[1]
        padding = columns - mask.sum(dim=1).cpu()
        # The last draft may exceed the text's maximum length.
        most = columns + new_tokens + (settings.get("prompt_lookup_num_tokens") or 0)

        def compute(ids: torch.Tensor, _: None, cache: Any) -> tuple[torch.Tensor, Any]:
            # Some architectures drop the cache and recompute a text that exceeds the length they
            # were trained on. This counts as a new generation.
            begins = cache is not self._cache
            return self._forward(ids, padding, most, begins), self._cache

        device = self._tail.device
        return output_head(self._tail.model, compute).generate(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=new_tokens,
            **settings,
        )

    def _forward(
        self, tokens: torch.Tensor, padding: torch.Tensor, most: int, begins: bool
    ) -> torch.Tensor:
        """Extend the caches; return (rows, columns, hidden), the output of the last block and norm.

        ``tokens``, (rows, columns), are the prompts if the generation ``begins``, else the next
        tokens of each row. Drafted tokens may follow them; those that ``generate`` has rejected are
        dropped from all caches. ``padding`` is the number of padding columns before each prompt,
        (prompts,), and ``most`` the maximum number of columns of the texts and drafts.
        """
        rows, columns = tokens.shape
        # The rows of several texts that continue the same prompt are adjacent.
        padding = padding.repeat_interleave(rows // len(padding))
        fields: dict[str, Value] = {"side": "left"}
        lengths = torch.full_like(padding, columns)
        drop = 0
        if begins:
            lengths -= padding
            left = Padding("left", lengths)
            self._parts = KeyValues(self._head, left, columns), KeyValues(self._tail, left, columns)
            self._sent = 0
            fields["new_tokens"] = most - columns
        elif drop := self._parts[0].length - self._cache.length:
            fields["drop"] = drop
        head, tail = self._parts
        hidden = self._exchange(self._sent, head.extend(tokens, drop), lengths, fields)
        self._sent += 1
        self._cache.length = head.length
        return tail.extend(hidden, drop)


class _Positions(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A stand-in for the parties' caches that tells ``generate`` only their length."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def __bool__(self) -> bool:
        return True  # although it has no layers

    def get_seq_length(self, *_: int) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        self.length += tokens_to_remove  # a negative number

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        raise NotImplementedError(
            "beam search is not supported with a split model; set num_beams to 1"
        )


def hidden_of_candidates(
    head: Part, tail: Part, batch: CandidateBatch, exchange: Exchange
) -> torch.Tensor:
    """Compute candidates' beginnings once, then their endings with the cached keys and values.

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
