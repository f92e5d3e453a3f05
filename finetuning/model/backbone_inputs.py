"""Inputs of a backbone: masks and positions of padded rows, and a cache that stores nothing."""

import inspect
from typing import Any

import torch
from transformers import Cache

# Types of blocks that cache only keys and values; others also cache states.
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


def left_padding(backbone: Any, lengths: torch.Tensor, columns: int) -> dict[str, torch.Tensor]:
    """Return the mask, and positions counted from each row's first token, as in ``generate``.

    Positions are omitted if the backbone doesn't accept them. ``lengths``, (rows,) int64, are the
    rows' numbers of tokens; ``columns`` counts tokens and padding together.
    """
    mask = (torch.arange(columns, device=lengths.device) >= columns - lengths[:, None]).long()
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        return {"attention_mask": mask}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


class NoCache(Cache):  # type: ignore[misc]
    """A cache that returns a block's keys and values without storing them.

    Without a cache, ``transformers`` checks in each forward pass whether rows consist of several
    packed texts, and waits for the device. Here, rows are never packed.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the given keys and values."""
        return key_states, value_states


def without_cache(backbone: Any) -> dict[str, Any]:
    """Return a backbone's arguments for rows without a prefix or earlier tokens.

    Blocks that recompute their activations accept no cache, and recurrent ones not this one.
    """
    arguments: dict[str, Any] = {"use_cache": False}
    kinds = getattr(backbone.config, "layer_types", None) or ()
    if not backbone.is_gradient_checkpointing and _ATTENTION.issuperset(kinds):
        arguments["past_key_values"] = NoCache()
    return arguments
