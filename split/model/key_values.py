"""The keys and values of one party's blocks during generation."""

from typing import Any

import torch
from transformers import DynamicCache

from finetuning.adapters.prefixes import shifted
from finetuning.devices import to_device
from finetuning.model.backbone_inputs import left_padding
from split.model.part import Part
from split.protocol.frames import Padding


class KeyValues:
    """The key-value cache of one party's blocks for a batch of texts.

    As in ``generate`` with a whole model, the attention mask and the position IDs are derived from
    the left padding of the prompts. If the adapter in use is a prefix, the prefix's keys and values
    precede all others, and its length is added to all positions, as in PEFT (FL-GLM section 3.1).

    Rows that end earlier than others are padded on the right; ignore the outputs at this padding.
    ``columns`` is the number of columns of the prompts, including their padding on the left.
    """

    def __init__(self, part: Part, padding: Padding, columns: int) -> None:
        blocks = part.partition.range_of(part.party)
        self._part = part
        self._backbone = part.model.base_model
        # Without blocks, there are no keys and values, and no cache.
        self.cache = _OwnBlocks(part.model.config, blocks.start) if blocks else None
        self._lengths = to_device(padding.lengths, part.device)
        self._padded = bool((padding.lengths < columns).any())
        self._prompt = left_padding(self._backbone, self._lengths, columns)
        self._before = part.columns_before
        if (prefixes := part.prefixes) is not None:
            self._prompt = shifted(self._prompt, prefixes.length)
            if self.cache is not None:
                prefixes.fill(self.cache, len(padding.lengths), part.dtype)
        if self.cache is not None:
            self.cache.activate_past_recording()  # so that sliding windows can be cropped
        self.columns = 0  # number of tokens of each row so far, including padding

    @property
    def length(self) -> int:
        """Number of keys and values of each row so far, including prefix and padding."""
        return self._before + self.columns

    def extend(self, given: torch.Tensor, drop: int = 0) -> torch.Tensor:
        """Compute the blocks for the prompts, or for the next tokens of each row.

        The last ``drop`` columns are first removed from the cache. See `Part.__call__` for
        ``given`` and the result.
        """
        if self.cache is not None and self.columns:
            self.cache.crop(-drop)
        self.columns -= drop
        inputs = self._part.inputs_of(given) | self._mask_and_positions(given.shape[1])
        self.columns += given.shape[1]
        with self._part.autocast():
            output = self._backbone(
                **inputs, past_key_values=self.cache, use_cache=self.cache is not None
            )
        return output.last_hidden_state  # type: ignore[no-any-return]

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times in adjacent rows, so that each copy can be continued."""
        if self.cache is not None:
            self.cache.batch_repeat_interleave(times)
        self._lengths = self._lengths.repeat_interleave(times)
        self._prompt = {n: value.repeat_interleave(times, 0) for n, value in self._prompt.items()}

    def _mask_and_positions(self, columns: int) -> dict[str, torch.Tensor]:
        """Return position IDs if the model accepts any, and a mask for blocks with padded rows."""
        inputs = dict(self._prompt)
        mask = inputs.pop("attention_mask")
        if self.columns:
            follow = self.length - mask.shape[1]  # negative if tokens of the prompts were dropped
            mask = torch.nn.functional.pad(mask, (0, follow + columns), value=1)
            if inputs:
                next_ones = torch.arange(follow, follow + columns, device=mask.device)
                inputs["position_ids"] = self._before + self._lengths[:, None] + next_ones
        if self._padded and self.cache is not None:
            inputs["attention_mask"] = mask
        return inputs


class _OwnBlocks(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """The cache of ``transformers``, restricted to the blocks of one party.

    Blocks pass their index in the whole model. The cache, and the types of attention in the
    configuration, are indexed from the party's first block.
    """

    def __init__(self, config: Any, first: int) -> None:
        super().__init__(config=config)
        self._first = first

    def update(self, keys: Any, values: Any, block: int, *more: Any, **others: Any) -> Any:
        return super().update(keys, values, block - self._first, *more, **others)

    def update_conv_state(self, states: Any, block: int, *more: Any, **others: Any) -> Any:
        return super().update_conv_state(states, block - self._first, *more, **others)

    def update_recurrent_state(self, states: Any, block: int, *more: Any, **others: Any) -> Any:
        return super().update_recurrent_state(states, block - self._first, *more, **others)

    def has_previous_state(self, layer_idx: int | None = None, *more: Any) -> Any:
        own = None if layer_idx is None else layer_idx - self._first
        return super().has_previous_state(own, *more)
