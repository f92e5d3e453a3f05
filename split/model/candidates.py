"""Compute candidate answers while the middle blocks are at a server."""

import torch

from finetuning.data.candidates import CandidateBatch
from split.model.generation import Exchange
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.frames import Padding, Value


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
