"""Convert Baichuan-7B and Baichuan2-7B to Llama.

Both models have Llama's architecture. The projections of queries, keys and values are rows of one
matrix, ``W_pack``. Baichuan2's output head divides each row of its matrix by the row's norm.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import LlamaConfig

from finetuning.conversion.plan import ConversionError, Plan, sizes

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)


def plan_baichuan(config: Mapping[str, Any]) -> Plan:
    """Return the plan for a checkpoint with ``model_type`` "baichuan".

    Raise a ConversionError if the checkpoint is neither Baichuan-7B nor Baichuan2-7B.
    """
    # Only the 13B models, which use ALiBi, lack this key.
    if "max_position_embeddings" not in config:
        raise ConversionError(
            "Baichuan-13B and Baichuan2-13B bias attention by distance (ALiBi), which the Llama "
            "class doesn't support; convert Baichuan-7B or Baichuan2-7B instead"
        )
    if config.get("tie_word_embeddings") or config.get("hidden_act", "silu") != "silu":
        raise ConversionError("config.json isn't Baichuan-7B's: it ties embeddings or lacks SiLU")
    second = "z_loss_weight" in config
    model = "Baichuan2-7B" if second else "Baichuan-7B"
    target = LlamaConfig(
        **sizes(config, {key: key for key in _SIZES}),
        num_key_value_heads=config["num_attention_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=config.get("bos_token_id", 1),
        eos_token_id=config.get("eos_token_id", 2),
        pad_token_id=config.get("pad_token_id", 0),
    )

    def rename(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        prefix, fused, _ = name.partition(".W_pack.weight")
        if fused:
            parts = tensor.chunk(3)
            return {f"{prefix}.{p}_proj.weight": part for p, part in zip("qkv", parts, strict=True)}
        if name.endswith(".rotary_emb.inv_freq"):
            return {}
        if second and name == "lm_head.weight":
            return {name: normalize(tensor.float()).to(tensor.dtype)}
        if not name.startswith(("model.", "lm_head.")):
            raise ConversionError(f"the tensor {name} is not one of {model}'s")
        return {name: tensor}

    changes = ["W_pack is divided into q_proj, k_proj and v_proj."]
    if second:
        changes.append(
            "The rows of lm_head are normalised, which the original does in each forward pass; if "
            "lm_head were trained further, their norms would change."
        )
    return Plan(
        model=model,
        config=target,
        rename=rename,
        tokenizer={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        | {"pad_token": "<unk>"},
        changes=tuple(changes),
    )
