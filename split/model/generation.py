"""Text generation and candidate answers with a model whose middle blocks are at a server."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

from finetuning.data.candidates import CandidateBatch
from finetuning.model.drafts import RowDrafts, drafting
from finetuning.model.output_head import output_head
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.frames import Padding, Value

# Function that sends (number of exchanges so far, hidden states, lengths, fields) to the body and
# returns the hidden states after the body.
Exchange = Callable[[int, torch.Tensor, torch.Tensor, dict[str, Value]], torch.Tensor]


def generate(
    head: Part,
    tail: Part,
    exchange: Exchange,
    tokens: torch.Tensor,
    mask: torch.Tensor,
    new_tokens: int,
    row_drafts: RowDrafts | None = None,
    **settings: Any,
) -> Any:
    """Run ``generate`` of the checkpoint's model class on the three parts and the output head.

    Its logits processors, sampling, stopping criteria and drafts apply. See ``WholeModel.generate``
    for the other arguments. Return prompts and answers, (rows, columns + new tokens), or what
    ``settings`` request.
    """
    prompt_columns = mask.shape[1]
    padding_of_prompts = prompt_columns - mask.sum(dim=1)
    # The last draft may exceed the text's maximum length.
    max_columns = prompt_columns + new_tokens + (settings.get("prompt_lookup_num_tokens") or 0)
    positions = _Positions()
    parts: list[KeyValues] = []  # caches of the head and the tail
    sent = 0

    def compute(ids: torch.Tensor, _: None, cache: Any) -> tuple[torch.Tensor, Any]:
        """Extend the caches; return the output of the last block and norm, and the positions.

        ``ids``, (rows, columns), are the prompts or the next tokens of each row. Drafted tokens may
        follow; those that ``generate`` has rejected are dropped from all caches.
        """
        nonlocal sent
        rows, columns = ids.shape
        # The rows of several texts that continue the same prompt are adjacent.
        padding = padding_of_prompts.repeat_interleave(rows // len(padding_of_prompts))
        fields: dict[str, Value] = {"side": "left"}
        lengths = torch.full_like(padding, columns)
        drop = 0
        # Some architectures drop the cache and recompute a text that exceeds the length they were
        # trained on. This counts as a new generation.
        if cache is not positions:
            lengths -= padding
            left = Padding("left", lengths)
            parts[:] = KeyValues(head, left, columns), KeyValues(tail, left, columns)
            sent = 0
            fields["new_tokens"] = max_columns - columns
        elif drop := parts[0].length - positions.length:
            fields["drop"] = drop
        hidden = exchange(sent, parts[0].extend(ids, drop), lengths, fields)
        sent += 1
        positions.length = parts[0].length
        return parts[1].extend(hidden, drop), positions

    model = output_head(tail.model, compute)
    with drafting(model, row_drafts):
        return model.generate(
            input_ids=tokens.to(tail.device),
            attention_mask=mask.to(tail.device),
            max_new_tokens=new_tokens,
            past_key_values=DynamicCache(),  # instead of one for the tail's blocks
            **settings,
        )


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
