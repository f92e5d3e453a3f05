"""P-tuning v2: trained keys and values before those of the tokens, in every block.

FL-GLM section 3.1, figure 2 and appendix A, without reparametrisation. PEFT calls it prefix tuning,
and saves one tensor (prefix length, blocks · 2 · heads · width): for each block its keys, then its
values.
"""

from collections.abc import Mapping
from typing import Any

import torch

from finetuning.model.base_model import BaseModelError

# The name of a whole model's prefixes in PEFT's saved format.
SAVED = "prompt_embeddings"


def key_value_shape(config: Any) -> tuple[int, int]:
    """Give how many heads a block's keys and values have, and how wide each is."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads), int(width)


def columns_of(config: Any) -> int:
    """Give how many numbers a block's keys and values take for each place of the prefix."""
    heads, width = key_value_shape(config)
    return 2 * heads * width


def prefix_cache(
    prefixes: Mapping[int, torch.Tensor], length: int, config: Any, rows: int, dtype: torch.dtype
) -> Any:
    """Give the key-value cache with which blocks compute as if the prefixes had come before.

    Args:
        prefixes: (length, 2 · heads · width) by the absolute number of the block.
        length: of the prefixes.
        config: of the model or the part; says how many heads there are.
        rows: of the batch; each has the same prefixes.
        dtype: of the blocks' keys and values.

    Returns:
        A ``DynamicCache`` for one forward pass, through which gradients flow to the prefixes.

    """
    from transformers import DynamicCache

    # Positions and masks are made for the length that the first block has; where that block is
    # another party's, something stands there that has a length and takes no memory.
    device = next((prefix.device for prefix in prefixes.values()), None)
    stand_in = torch.zeros(1, 1, length, 1, dtype=dtype, device=device)
    layers = []
    for number in range(max(prefixes, default=0) + 1):
        if number in prefixes:
            layers.append(_keys_and_values(prefixes[number], config, rows, dtype))
        else:
            layers.append((stand_in, stand_in))
    return DynamicCache(layers)


def _keys_and_values(
    prefix: torch.Tensor, config: Any, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give a block's prefix as (rows, heads, length, width) of keys and of values; no copies."""
    heads, width = key_value_shape(config)
    both = prefix.to(dtype).view(len(prefix), 2, heads, width).permute(1, 2, 0, 3)
    keys, values = both[:, None].expand(-1, rows, -1, -1, -1)
    return keys, values


class BlockPrefixes:
    """The prefixes of some of a model's blocks, one tensor for each.

    They are zero until they are set.

    Args:
        config: of the part; says how many heads there are.
        length: of the prefixes.
        devices: of the blocks, by their absolute numbers.

    Attributes:
        length: how many places they take.
        parameters: (length, 2 · heads · width) float32 by name, sorted.

    """

    def __init__(self, config: Any, length: int, devices: Mapping[int, torch.device]) -> None:
        self._config = config
        self.length = length
        shape = (length, columns_of(config))
        self._blocks = {
            number: torch.nn.Parameter(torch.zeros(shape, device=device))
            for number, device in devices.items()
        }
        named = {name_of_block(number): value for number, value in self._blocks.items()}
        self.parameters = dict(sorted(named.items()))

    def before(self, inputs: Mapping[str, Any], rows: int, dtype: torch.dtype) -> dict[str, Any]:
        """Give a backbone's inputs with the prefixes before them, which need no mask themselves.

        Args:
            inputs: of the tokens; with padding on the left their mask and positions, too.
            rows: of the batch.
            dtype: that the blocks compute in.

        """
        cache = prefix_cache(self._blocks, self.length, self._config, rows, dtype)
        return {**self.shift(inputs), "past_key_values": cache}

    def shift(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Give a backbone's inputs with mask and positions, if any, moved behind the prefixes."""
        result = dict(inputs)
        if "attention_mask" in inputs:
            mask = inputs["attention_mask"]
            result["attention_mask"] = torch.cat([mask.new_ones(len(mask), self.length), mask], 1)
        if "position_ids" in inputs:
            result["position_ids"] = inputs["position_ids"] + self.length
        return result

    @torch.no_grad()
    def fill(self, cache: Any, rows: int, dtype: torch.dtype) -> None:
        """Put the prefixes into a cache that is empty; text can then grow behind them.

        Args:
            cache: of ``transformers``, that takes blocks by their absolute numbers.
            rows: of the batch.
            dtype: of the blocks' keys and values.

        """
        for number, prefix in self._blocks.items():
            cache.update(*_keys_and_values(prefix, self._config, rows, dtype), number)


def name_of_block(number: int) -> str:
    """Name a block's prefix where every block has a tensor of its own."""
    return f"{SAVED}.{number}"


def refuse_without_prefix(model: Any, length: int) -> None:
    """Check that all of an architecture's blocks let prefixes stand before their keys and values.

    Args:
        model: the causal language model on the meta device, where nothing is computed, in bfloat16,
            which alone some mixtures of experts take there.
        length: of the prefix.

    Raises:
        BaseModelError: some block doesn't; the message names the architecture.

    """
    try:
        config = model.config
        blocks = int(config.num_hidden_layers)
        prefix = torch.zeros(length, columns_of(config), dtype=torch.bfloat16, device="meta")
        cache = prefix_cache(dict.fromkeys(range(blocks), prefix), length, config, 1, prefix.dtype)
        width = model.get_input_embeddings().embedding_dim
        token = torch.zeros(1, 1, width, dtype=prefix.dtype, device="meta")
        model.base_model(inputs_embeds=token, past_key_values=cache, use_cache=False)
        lengths = [layer.get_seq_length() for layer in cache.layers]
        without = [i for i, found in enumerate(lengths) if found != length + 1]
        reason = f"block {without[0]} has no attention that reads them" if without else ""
    except Exception as error:  # Whatever an architecture that doesn't fit may raise.
        reason = f"{type(error).__name__}: {error}".partition(". ")[0]
    if reason:
        raise BaseModelError(
            f'adapter.kind = "prefix" is not for {type(model).__name__}, whose blocks can\'t have '
            f'keys and values before their own ({reason}); use adapter.kind = "lora", or another '
            "base model"
        )
