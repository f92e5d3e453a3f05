"""P-tuning v2: trained keys and values that precede the tokens' keys and values in every block.

See FL-GLM section 3.1, figure 2 and appendix A; reparametrisation is not used. PEFT calls this
method prefix tuning and saves one tensor (prefix length, blocks · 2 · heads · width) with the keys
and then the values of each block.
"""

from collections.abc import Mapping
from typing import Any

import torch

from finetuning.errors import BaseModelError

# Name of a whole model's prefixes in PEFT's saved format.
SAVED = "prompt_embeddings"


def key_value_shape(config: Any) -> tuple[int, int]:
    """Return the number of heads of a block's keys and values, and the width of a head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads), int(width)


def columns_of(config: Any) -> int:
    """Return the size of a block's keys and values for one prefix position."""
    heads, width = key_value_shape(config)
    return 2 * heads * width


def prefix_cache(prefixes: Mapping[int, torch.Tensor], length: int, config: Any) -> Any:
    """Return a key-value cache that makes blocks compute as if the prefixes preceded the tokens.

    The ``DynamicCache`` is for one forward pass; gradients flow back through it to the prefixes.
    ``prefixes`` maps a block's number in the whole model to the result of `prefix_of_rows`.
    """
    from transformers import DynamicCache

    # Positions and masks depend on the length of the first block's cache. If another party runs the
    # first block, a placeholder of the same length, which uses hardly any memory, is cached for it.
    placeholder = torch.zeros(1, 1, length, 1)
    return DynamicCache(
        _keys_and_values(prefixes[number], config)
        if number in prefixes
        else (placeholder, placeholder)
        for number in range(max(prefixes, default=0) + 1)
    )


def _keys_and_values(prefix: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values in a block's prefix, each (rows, heads, length, width)."""
    of_rows = prefix.view(*prefix.shape[:2], 2, *key_value_shape(config))
    keys, values = of_rows.permute(2, 0, 3, 1, 4)
    return keys, values


def prefix_of_rows(
    prefix: torch.Tensor, rows: int, dtype: torch.dtype, dropout: float = 0.0
) -> torch.Tensor:
    """Return a prefix, (length, columns) or (rows, length, columns), for each row in a data type.

    Dropout has a rate, and differs between rows.
    """
    if dropout:
        return torch.nn.functional.dropout(prefix.expand(rows, -1, -1), dropout).to(dtype)
    return prefix.to(dtype).expand(rows, -1, -1)


def shift_inputs(inputs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return a backbone's inputs with the mask and positions, if any, shifted by ``length``."""
    result = dict(inputs)
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        result["attention_mask"] = torch.cat([mask.new_ones(len(mask), length), mask], 1)
    if "position_ids" in inputs:
        result["position_ids"] = inputs["position_ids"] + length
    return result


class BlockPrefixes:
    """Prefixes of some of a model's blocks, one tensor per block, initialised to zero.

    Blocks are numbered as in the whole model. ``parameters`` maps names, in sorted order, to
    float32 tensors (length, 2 · heads · width). ``dropout`` is the rate in training.
    """

    def __init__(
        self, config: Any, length: int, devices: Mapping[int, torch.device], dropout: float = 0.0
    ) -> None:
        self._config = config
        self._dropout = dropout
        self.length = length
        shape = (length, columns_of(config))
        self._blocks = {
            number: torch.nn.Parameter(torch.zeros(shape, device=device))
            for number, device in devices.items()
        }
        named = {name_of_block(number): value for number, value in self._blocks.items()}
        self.parameters = dict(sorted(named.items()))

    def before(
        self, inputs: Mapping[str, Any], rows: int, dtype: torch.dtype, training: bool = False
    ) -> dict[str, Any]:
        """Return a backbone's inputs with the prefixes added as a cache.

        The inputs need a mask and positions only if the tokens are padded on the left. In training,
        dropout is applied to the prefixes.
        """
        prefixes = {
            number: prefix_of_rows(prefix, rows, dtype, self._dropout * training)
            for number, prefix in self._blocks.items()
        }
        cache = prefix_cache(prefixes, self.length, self._config)
        return {**shift_inputs(inputs, self.length), "past_key_values": cache}

    @torch.no_grad()
    def fill(self, cache: Any, rows: int, dtype: torch.dtype) -> None:
        """Put the prefixes into an empty cache, so that text can be generated after them.

        The cache is indexed by the blocks' numbers in the whole model.
        """
        for number, prefix in self._blocks.items():
            of_rows = prefix_of_rows(prefix, rows, dtype)
            cache.update(*_keys_and_values(of_rows, self._config), number)


def name_of_block(number: int) -> str:
    """Return the name of a block's prefix in the format with one tensor per block."""
    return f"{SAVED}.{number}"


def refuse_without_prefix(model: Any, length: int) -> None:
    """Raise a BaseModelError if a block can't have a prefix before its keys and values.

    The model must be in bfloat16 on the meta device, where nothing is computed. Some
    mixture-of-experts models accept only bfloat16 there.
    """
    try:
        config = model.config
        prefix = torch.zeros(1, length, columns_of(config), dtype=torch.bfloat16, device="meta")
        prefixes = dict.fromkeys(range(int(config.num_hidden_layers)), prefix)
        cache = prefix_cache(prefixes, length, config)
        width = model.get_input_embeddings().embedding_dim
        token = torch.zeros(1, 1, width, dtype=prefix.dtype, device="meta")
        model.base_model(inputs_embeds=token, past_key_values=cache, use_cache=False)
        lengths = [layer.get_seq_length() for layer in cache.layers]
        without = [i for i, cached in enumerate(lengths) if cached != length + 1]
        reason = f"block {without[0]} has no attention that reads a prefix" if without else ""
    except Exception as error:  # An unsupported architecture can raise any exception.
        reason = f"{type(error).__name__}: {error}".partition(". ")[0]
    if reason:
        raise BaseModelError(
            f'adapter.kind = "prefix" does not support {type(model).__name__}, whose blocks can\'t '
            f'have keys and values before their own ({reason}); use adapter.kind = "lora", or a '
            "different base model"
        )
