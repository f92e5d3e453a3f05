"""Generating text when the middle blocks are at a server: ``transformers``' own loop, by a lane."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from finetuning.adapters.prefixes import prefix_cache
from finetuning.model.whole_model import output_head
from split.model.key_values import KeyValues
from split.model.part import Padding, Part
from split.protocol.frames import Value

# Sends (tokens so far, hidden states, lengths, fields), and gives the hidden states after the body.
Exchange = Callable[[int, torch.Tensor, torch.Tensor, dict[str, Value]], torch.Tensor]


class Generation:
    """One batch of prompts that are continued.

    Args:
        head: embedding and first blocks.
        tail: last blocks, norm and output head.
        mask: (rows, columns) 1 for the prompts' tokens, 0 for padding, which stands before them.
        new_tokens: most tokens that a row may get.
        exchange: takes hidden states through the body.

    """

    def __init__(
        self,
        head: Part,
        tail: Part,
        mask: torch.Tensor,
        new_tokens: int,
        exchange: Exchange,
    ) -> None:
        self._head = head
        self._tail = tail
        columns = mask.shape[1]
        self._padding = columns - mask.sum(dim=1).cpu()
        self._new_tokens = new_tokens
        self._end = columns + new_tokens
        self._exchange = exchange
        self._kept: tuple[KeyValues, KeyValues] | None = None
        self._sent = 0

    def run(self, tokens: torch.Tensor, mask: torch.Tensor, settings: dict[str, Any]) -> Any:
        """Let ``generate`` do its work on the checkpoint's own class.

        Logits processors, sampling and stopping are the library's; of the model it sees the tail's
        output head, in front of which the three parts compute.

        Args:
            tokens: (rows, columns) of the prompts.
            mask: of the same shape, as above.
            settings: further ones of ``generate``.

        Returns:
            (rows, columns and new tokens), or what else the settings ask for.

        """
        model = output_head(self._tail.model)
        setattr(model, model.base_model_prefix, _Backbone(self))
        device = self._tail.device
        return model.generate(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=self._new_tokens,
            **settings,
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Give (rows, columns, hidden) after the last block and norm, and remember the tokens.

        Args:
            tokens: (rows, columns): the prompts, or what follows in each row. Some architectures
                compute everything again when a text outgrows what they were trained for: then it
                is all of the text, and a new generation.

        Raises:
            ValueError: it is something else.

        """
        rows, columns = tokens.shape
        # Where several texts continue a prompt, its rows stand together.
        padding = self._padding.repeat_interleave(rows // len(self._padding))
        fields: dict[str, Value] = {"side": "left"}
        if self._kept is None or columns == self._kept[0].columns + 1:
            lengths = columns - padding
            left = Padding("left", lengths)
            self._kept = (
                KeyValues(self._head, left, columns),
                KeyValues(self._tail, left, columns),
            )
            self._sent = 0
            fields["new_tokens"] = self._end - columns
        elif columns == 1:
            lengths = torch.ones_like(padding)
        else:
            raise ValueError(f"generation went on with {columns} tokens at once; one is expected")
        head, tail = self._kept
        hidden = self._exchange(self._sent, head.extend(tokens), lengths, fields)
        self._sent += 1
        return tail.extend(hidden)

    @property
    def cache(self) -> Any:
        """The head's keys and values, for ``generate`` to know how many there are."""
        if self._kept is None:
            return None
        head, config = self._kept[0], self._head.model.config
        if head.cache is not None:
            return head.cache
        # An embedding alone has none. What stands for them has their length and no content.
        return prefix_cache({}, head.length, config, 1, self._head.dtype)


class _Backbone(nn.Module):
    """Stands where the model has its blocks; positions and masks each party derives itself."""

    def __init__(self, generation: Generation) -> None:
        super().__init__()
        self._generation = generation

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        hidden = self._generation.forward(input_ids)
        output = MoeModelOutputWithPast(
            last_hidden_state=hidden, past_key_values=self._generation.cache
        )
        output.cross_attentions = None  # GPT-2 passes them on.
        return output

    @property
    def decoder(self) -> "_Backbone":
        """OPT calls its blocks under this name."""
        return self
