"""Build a narrow, randomly initialised model with a checkpoint's architecture and depth."""

import copy
import re
from typing import Any

import torch

# Maximum widths of names in configurations that match a pattern; _narrow also sets other values.
_WIDTHS: tuple[tuple[str, int], ...] = (
    (r".*intermediate_size.*|ffn_dim|n_inner|ffn_hidden_size", 32),
    (r"vocab_size(_per_layer_input)?", 64),
    (r"(q|kv)_lora_rank|v_head_dim|qk_head_dim", 16),
    (r"qk_(rope|nope)_head_dim|rotary_dim|hidden_size_per_layer_input", 8),
    (r"linear_(key|value)_head_dim", 8),
    (r"(num|moe_num)_(local_)?experts|n_routed_experts|linear_num_value_heads", 4),
    (r"num_experts_per_tok|moe_k|top_k_experts|linear_num_key_heads", 2),
    (r"n_group|topk_group|n_shared_experts|mamba_n_groups", 1),
    (r"mamba_d_state|mamba_chunk_size", 8),
    (r"mamba_n_heads", 4),
    # Short windows, so that they affect even short texts.
    (r"sliding_window|attention_chunk_size|window_size", 4),
)
_HEAD = 16
# More weights would make the check too slow. A model with learned position embeddings and 80 blocks
# needs a tenth of this number.
_MAX_WEIGHTS = 2 * 10**7


def build_miniature(config: Any) -> Any:
    """Build a randomly initialised float32 model with all blocks and small widths.

    ``config``, the configuration of the real checkpoint, is not changed. Any exception can be
    raised if the architecture does not support these widths, or needs too many weights.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    _narrow(config)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if weights > _MAX_WEIGHTS:
        raise ValueError(f"its test model needs {weights} weights; the limit is {_MAX_WEIGHTS}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Use larger weights than usual, so that rounding does not hide the effect of any module.
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def _narrow(config: Any) -> None:
    """Set small widths in a configuration, in proportions that keep it valid."""
    heads = config.num_attention_heads
    groups = vars(config).get("num_key_value_heads") or heads
    few_heads = min(heads, 4)
    few_groups = few_heads if groups == heads else min(groups, 2)
    same = getattr(config, "word_embed_proj_dim", None) == config.hidden_size
    for name, value in list(vars(config).items()):
        width = next((width for pattern, width in _WIDTHS if re.fullmatch(pattern, name)), None)
        if width is not None and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, width))
        elif name.endswith("_token_id") and value is not None:
            setattr(config, name, 0)
    config.num_attention_heads = few_heads
    config.hidden_size = few_heads * _HEAD
    for name, width in (
        ("num_key_value_heads", few_groups),
        ("num_kv_heads", few_groups),
        ("head_dim", getattr(config, "qk_rope_head_dim", _HEAD)),
        ("word_embed_proj_dim", config.hidden_size if same else _HEAD),
    ):
        if isinstance(vars(config).get(name), int):
            setattr(config, name, width)
    if "mamba_n_heads" in vars(config):
        inner = config.mamba_expand * config.hidden_size
        config.mamba_d_head = inner // config.mamba_n_heads
        if getattr(config, "mamba_d_ssm", None):  # Falcon-H1
            config.mamba_d_ssm = inner
    if config.is_heterogeneous:  # Gemma 4 has other heads in blocks with full attention
        sizes = {"head_dim": 2 * _HEAD, "num_key_value_heads": 1}
        config.per_layer_config = {
            block: {name: sizes.get(name, value) for name, value in settings.items()}
            for block, settings in config.to_dict()["per_layer_config"].items()
        }
    _shorten_factors(vars(config).get("rope_parameters"))
    vars(config).pop("quantization_config", None)


def _shorten_factors(rope: Any) -> None:
    """Truncate the scaling factors of rotary frequencies to the number that narrow heads use."""
    if isinstance(rope, dict):
        pairs = int(_HEAD * (rope.get("partial_rotary_factor") or 1)) // 2
        for name, value in rope.items():
            if name in {"long_factor", "short_factor"}:
                rope[name] = value[:pairs]
            _shorten_factors(value)
