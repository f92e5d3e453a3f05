"""Convert ChatGLM2-6B and ChatGLM3-6B to GLM.

Like both models, the GLM class applies rotary embeddings to the first half of each head, in pairs
of adjacent values. Tensor names differ, and both models fuse the query, key and value matrices.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GlmConfig

from finetuning.conversion.plan import ConversionError, Plan, sizes

Version = Literal[2, 3]

# Not a .jinja file: Flower's app bundles leave those out, and a worker's code must equal the app's.
_TEMPLATES = Path(__file__).parent / "chat_templates.toml"

_SIZES = {
    "padded_vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "multi_query_group_num": "num_key_value_heads",
    "kv_channels": "head_dim",
    "seq_length": "max_position_embeddings",
    "layernorm_epsilon": "rms_norm_eps",
}
# Values in config.json that the GLM class requires, and that both models have.
_REQUIRED = {
    "rmsnorm": True,
    "multi_query_attention": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "post_layer_norm": True,
    "original_rope": True,
}
_ABSENT = ("quantization_bit", "pre_seq_len", "tie_word_embeddings")
_OUTSIDE = {
    "transformer.embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "transformer.encoder.final_layernorm.weight": "model.norm.weight",
    "transformer.output_layer.weight": "lm_head.weight",
}
_IN_BLOCKS = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.dense.weight": "self_attn.o_proj.weight",
    "mlp.dense_h_to_4h.weight": "mlp.gate_up_proj.weight",
    "mlp.dense_4h_to_h.weight": "mlp.down_proj.weight",
}
_BLOCK = re.compile(r"transformer\.encoder\.layers\.(\d+)\.(.+)")
_COMMON_TOKENS = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>")
_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")


def plan_chatglm(config: Mapping[str, Any], name: str, version: Version | None) -> Plan:
    """Return the plan for a checkpoint with ``model_type`` "chatglm".

    If the version is None, it is detected from the name in ``config.json`` and the folder's name.
    Raise a ConversionError if the version is ambiguous, or the model is not ChatGLM2 or ChatGLM3.
    """
    _refuse_others(config)
    version = version or _version(f"{config.get('_name_or_path', '')} {name}")
    ratio = config.get("rope_ratio", 1)
    if version == 2 and ratio != 1:
        raise ConversionError(
            "ChatGLM2's long-context variant interpolates positions, which the GLM class doesn't "
            "support; convert ChatGLM2-6B or ChatGLM3-6B-32k instead"
        )
    model = f"ChatGLM{version}-6B"
    rope = {"rope_type": "default", "rope_theta": 10000.0 * ratio, "partial_rotary_factor": 0.5}
    target = GlmConfig(
        **sizes(config, _SIZES),
        attention_bias=config.get("add_qkv_bias") is True,
        hidden_act="silu",
        tie_word_embeddings=False,
        rope_parameters=rope,
        bos_token_id=None,
        eos_token_id=config.get("eos_token_id", 2),
        pad_token_id=config.get("pad_token_id", 0),
    )
    queries = target.num_attention_heads * target.head_dim
    keys = target.num_key_value_heads * target.head_dim

    def rename(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name in _OUTSIDE:
            return {_OUTSIDE[name]: tensor}
        if name.endswith("rotary_pos_emb.inv_freq"):
            return {}
        block = _BLOCK.fullmatch(name)
        if block and block[2] in _IN_BLOCKS:
            return {f"model.layers.{block[1]}.{_IN_BLOCKS[block[2]]}": tensor}
        if block and block[2].startswith("self_attention.query_key_value."):
            if len(tensor) != queries + 2 * keys:
                raise ConversionError(
                    f"{name} has {len(tensor)} rows; config.json requires {queries + 2 * keys}"
                )
            kind = block[2].rpartition(".")[2]
            parts = tensor.tensor_split((queries, queries + keys))
            return {
                f"model.layers.{block[1]}.self_attn.{p}_proj.{kind}": part
                for p, part in zip("qkv", parts, strict=True)
            }
        raise ConversionError(f"the tensor {name} is not one of {model}'s")

    return Plan(
        model=model,
        config=target,
        rename=rename,
        special_tokens=_COMMON_TOKENS + (_ROLES if version == 3 else ()),
        first_tokens=("[gMASK]", "<sop>"),
        tokenizer={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
        | {"padding_side": "left"},
        chat_template=tomllib.loads(_TEMPLATES.read_text(encoding="utf-8"))[f"chatglm{version}"],
        end_of_answer=("<|user|>", "<|observation|>") if version == 3 else (),
        changes=(
            "query_key_value is divided into q_proj, k_proj and v_proj.",
            "The special tokens sop and eop are called <sop> and <eop>, so that they are not found "
            "inside words; their ids are the same.",
        ),
    )


def _refuse_others(config: Mapping[str, Any]) -> None:
    if "position_encoding_2d" in config or "max_sequence_length" in config:
        raise ConversionError(
            "ChatGLM-6B (the first version) uses two-dimensional positions and attention that no "
            "class of transformers supports; convert ChatGLM2-6B or ChatGLM3-6B instead, or use "
            "GLM-4-9B-hf without conversion"
        )
    if config.get("padded_vocab_size") == 151552:
        raise ConversionError(
            "GLM-4-9B need not be converted: use the publisher's own checkpoint for transformers, "
            "zai-org/glm-4-9b-hf or zai-org/glm-4-9b-chat-hf"
        )
    different = [
        f"{key} = {config.get(key)}" for key, v in _REQUIRED.items() if config.get(key) != v
    ]
    different += [f"{key} = {config[key]}" for key in _ABSENT if config.get(key)]
    if different:
        raise ConversionError(
            f"config.json fits neither ChatGLM2-6B nor ChatGLM3-6B: {', '.join(different)}"
        )


def _version(names: str) -> Version:
    versions = set(re.findall(r"chatglm([23])", names.lower()))
    if len(versions) != 1:
        raise ConversionError(
            "neither config.json nor the folder's name shows whether this is ChatGLM2 or ChatGLM3, "
            "whose prompts differ; add --chatglm-version 2 or 3"
        )
    return 2 if versions == {"2"} else 3
