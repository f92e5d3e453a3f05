"""A key-value cache that stores nothing, for forward passes that don't generate text."""

from typing import Any

import torch
from transformers import Cache


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

    Blocks that recompute their activations accept no cache.
    """
    arguments: dict[str, Any] = {"use_cache": False}
    if not backbone.is_gradient_checkpointing:
        arguments["past_key_values"] = NoCache()
    return arguments
