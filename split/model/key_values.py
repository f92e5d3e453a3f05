"""The keys and values of one party's blocks during generation."""

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from finetuning.adapters.prefixes import shift_inputs
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
        self.part = part
        self._backbone = part.model.base_model
        # Without blocks, there are no keys and values, and no cache.
        self.cache = _OwnBlocks(part.model.config, blocks.start) if blocks else None
        self._lengths = to_device(padding.lengths, part.device)
        self._padded = bool((padding.lengths < columns).any())
        self._prompt = left_padding(self._backbone, self._lengths, columns)
        self._before = part.columns_before
        if (prefixes := part.prefixes) is not None:
            self._prompt = shift_inputs(self._prompt, prefixes.length)
            if self.cache is not None:
                prefixes.fill(self.cache, len(padding.lengths), part.dtype)
        # Recurrent states can't be cropped; all other blocks record what they need for it.
        self._can_drop = self.cache is not None and not part.model._is_stateful
        if self.cache is not None and self._can_drop:
            self.cache.activate_past_recording()
        self.columns = 0  # number of tokens of each row so far, including padding

    @property
    def length(self) -> int:
        """Number of keys and values of each row so far, including prefix and padding."""
        return self._before + self.columns

    def extend(self, tokens_or_states: torch.Tensor, drop: int = 0) -> torch.Tensor:
        """Compute the blocks for the prompts, or for the next tokens of each row.

        First remove the last ``drop`` columns from the cache. See `Part.__call__` for the argument
        and the result.
        """
        if self.cache is not None and self._can_drop and self.columns:
            self.cache.crop(-drop)
        elif self.cache is not None and drop:
            raise ValueError("recurrent blocks can't remove tokens; generate without drafts")
        self.columns -= drop
        inputs = self.mask_and_positions(tokens_or_states.shape[1])
        if not self._padded or self.cache is None:
            del inputs["attention_mask"]
        self.columns += tokens_or_states.shape[1]
        return self._compute(tokens_or_states, inputs, self.cache)

    @cached_property
    def can_join(self) -> bool:
        """Whether `extend_together` supports the part (no sliding windows and no experts)."""
        paths = (path for path, _ in self._backbone.named_modules())
        return (
            self.cache is not None
            and all(type(layer) is DynamicLayer for layer in self.cache.layers)
            and not any("expert" in path for path in paths)
        )

    @staticmethod
    def extend_together(
        texts: Sequence["KeyValues"], states: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Compute the blocks for the next token of each row of several caches in one pass.

        ``states`` and the result contain the hidden states of each cache, (rows, 1, hidden). Select
        the adapters with `Part.using_together`. After an error, the caches are unchanged.
        """
        first, rows = texts[0], [len(own) for own in states]
        columns = max(each.length for each in texts) + 1
        inputs: dict[str, list[torch.Tensor]] = {}
        for each in texts:
            for name, value in each.mask_and_positions(1).items():
                missing = columns - value.shape[1] if name == "attention_mask" else 0
                inputs.setdefault(name, []).append(pad(value, (missing, 0)))
        try:
            output = first._compute(
                torch.cat([*states]),
                {name: torch.cat(values) for name, values in inputs.items()},
                _OwnBlocks.joined([each.cache for each in texts], rows),
            )
        except Exception:  # some blocks may have cached the token
            for each in texts:
                assert each.cache is not None
                for layer in each.cache.layers:
                    layer.crop(min(0, each.length - layer.get_seq_length()))
            raise
        for each in texts:
            each.columns += 1
        # A view would keep all rows in memory until a slow client has received its part.
        return [part.clone() for part in torch.split(output, rows)]

    def _compute(
        self, tokens_or_states: torch.Tensor, inputs: dict[str, Any], cache: Any
    ) -> torch.Tensor:
        inputs = self.part.inputs_of(tokens_or_states) | inputs
        with self.part.autocast():
            output = self._backbone(**inputs, past_key_values=cache, use_cache=cache is not None)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def repeat(self, times: int) -> None:
        """Repeat each row ``times`` times in adjacent rows, so that each copy can be continued."""
        if self.cache is not None:
            self.cache.reorder_cache(torch.arange(len(self._lengths)).repeat_interleave(times))
        self._lengths = self._lengths.repeat_interleave(times)
        self._prompt = {n: value.repeat_interleave(times, 0) for n, value in self._prompt.items()}

    def free(self) -> None:
        """Do nothing, because keys and values are freed with the last reference to them."""

    def mask_and_positions(self, columns: int) -> dict[str, torch.Tensor]:
        """Return the attention mask and, if the model accepts any, position IDs."""
        inputs = dict(self._prompt)
        mask = inputs.pop("attention_mask")
        if self.columns:
            follow = self.length - mask.shape[1]  # negative if tokens of the prompts were dropped
            mask = pad(mask, (0, follow + columns), value=1)
            if inputs:
                next_ones = torch.arange(follow, follow + columns, device=mask.device)
                inputs["position_ids"] = self._before + self._lengths[:, None] + next_ones
        return inputs | {"attention_mask": mask}


class _OwnBlocks(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """The cache of ``transformers``, restricted to the blocks of one party.

    Blocks pass their index in the whole model, but the cache and the attention types in the
    configuration are indexed from the party's first block.
    """

    def __init__(self, config: Any, first: int) -> None:
        super().__init__(config=config)
        self._first = first

    @classmethod
    def joined(cls, caches: Sequence[Any], rows: Sequence[int]) -> "_OwnBlocks":
        """Return a cache for a batch of the rows of several caches, which it updates."""
        new: _OwnBlocks = copy(caches[0])
        new.layers = [
            _JoinedLayer(each, rows) for each in zip(*(c.layers for c in caches), strict=True)
        ]
        return new

    def update(self, keys: Any, values: Any, layer_idx: int, *more: Any, **others: Any) -> Any:
        return super().update(keys, values, layer_idx - self._first, *more, **others)

    def get_conv_state(self, layer_idx: int, **others: Any) -> Any:
        return super().get_conv_state(layer_idx - self._first, **others)

    def update_conv_state(self, states: Any, layer_idx: int, **others: Any) -> Any:
        return super().update_conv_state(states, layer_idx - self._first, **others)

    def get_recurrent_state(self, layer_idx: int, **others: Any) -> Any:
        return super().get_recurrent_state(layer_idx - self._first, **others)

    def update_recurrent_state(self, states: Any, layer_idx: int, **others: Any) -> Any:
        return super().update_recurrent_state(states, layer_idx - self._first, **others)

    def has_previous_state(self, layer_idx: int | None = None, *more: Any) -> Any:
        own = None if layer_idx is None else layer_idx - self._first
        return super().has_previous_state(own, *more)

    def is_recording_past(self, layer_idx: int) -> Any:
        return super().is_recording_past(layer_idx - self._first)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if all(self.is_linear) else int(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> Any:
        if all(self.is_linear):  # no block uses a mask of keys
            return query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)


class _JoinedLayer(DynamicLayer):  # type: ignore[misc]
    """One block's keys and values of several caches, padded on the left to the same length."""

    def __init__(self, layers: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__()
        self._layers, self._rows = layers, [*rows]

    def get_seq_length(self) -> int:
        return max(int(layer.get_seq_length()) for layer in self._layers)

    def update(self, keys: Any, values: Any, *_: Any, **__: Any) -> Any:
        own = zip(self._layers, keys.split(self._rows), values.split(self._rows), strict=True)
        updated = [layer.update(k, v) for layer, k, v in own]
        length = self.get_seq_length()
        joined = []
        for caches in zip(*updated, strict=True):  # the keys of all layers, then the values
            padded = [pad(cache, (0, 0, length - cache.shape[-2], 0)) for cache in caches]
            joined.append(torch.cat(padded))
        return tuple(joined)
