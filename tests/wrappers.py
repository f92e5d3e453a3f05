"""Small random models of text and images or sound, in the layouts in which they are published."""

import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.finetuning.conftest import DELTA, EXPERTS, ROUTED, SIZES

FOUR = {"num_hidden_layers": 4, "head_dim": 8}
RECURRENT = DELTA | FOUR | {"layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}
WINDOWS = FOUR | {"sliding_window": 4}
WINDOWS |= {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}
# Blocks that read the token IDs, and the keys and values of earlier blocks.
SHARING = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64}
SHARING |= {"layer_types": ["sliding_attention", "full_attention"] * 3}
SHARING |= {"hidden_size_per_layer_input": 8}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
HALF = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
YARN |= {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0}
LLAMA_4 = {"intermediate_size_mlp": 48, "num_local_experts": 4, "num_experts_per_tok": 1}
LLAMA_4 |= {"interleave_moe_layer_step": 2, "attention_chunk_size": 4, "rope_parameters": ROPE}
GEMMA_4 = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16}

SIGHT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
SIGHT |= {"intermediate_size": 64, "image_size": 16, "head_dim": 8, "num_key_value_heads": 2}
QWEN = {"hidden_size": 16, "depth": 1, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32}
QWEN |= {"intermediate_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
PROJECTED = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
# Names in memory, and published names that ``save_pretrained`` doesn't write.
LLAVA = {
    r"^model\.language_model\.": "language_model.model.",
    r"^lm_head\.": "language_model.lm_head.",
    r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
}
# By name in the documentation: the published class, the text model's type and settings, the
# settings of the other model, and new names.
WRAPPERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "Qwen3.5": ("Qwen3_5", "qwen3_5_text", RECURRENT | HALF, QWEN, {}),
    "Qwen3.5 MoE": ("Qwen3_5Moe", "qwen3_5_moe_text", RECURRENT | EXPERTS | HALF, QWEN, {}),
    "Qwen3-VL": (
        "Qwen3VL",
        "qwen3_vl_text",
        FOUR | {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}},
        QWEN,
        {},
    ),
    "GLM-4.5V": ("Glm4vMoe", "glm4v_moe_text", ROUTED | FOUR | HALF, QWEN | {"image_size": 16}, {}),
    "Gemma 3": ("Gemma3", "gemma3_text", WINDOWS, SIGHT, LLAVA),
    "Gemma 4 (31B)": (
        "Gemma4",
        "gemma4_text",
        GEMMA_4 | WINDOWS | {"hidden_size_per_layer_input": 0},
        SIGHT,
        {},
    ),
    "Gemma 4 (E2B, E4B)": ("Gemma4", "gemma4_text", GEMMA_4 | WINDOWS | SHARING, SIGHT, {}),
    # The class with images and sound needs another package.
    "Gemma 3n": (
        "",
        "gemma3n_text",
        WINDOWS | SHARING | {"laurel_rank": 4, "activation_sparsity_pattern": None},
        {},
        {r"^model\.": "model.language_model."},
    ),
    "Mistral Small 3": ("Mistral3", "mistral", FOUR, SIGHT, LLAVA),
    "Ministral 3": ("Mistral3", "ministral3", FOUR | {"rope_parameters": YARN}, SIGHT, LLAVA),
    "Llama 4": ("Llama4", "llama4_text", LLAMA_4 | FOUR, SIGHT | PROJECTED, {}),
}


def write_wrapper(name: str, directory: Path) -> Any:
    """Write a checkpoint, and return the model in memory."""
    published, kind, text, other, renamed = WRAPPERS[name]
    settings = {"model_type": kind, "tie_word_embeddings": name != "Mistral Small 3"}
    settings |= SIZES | text
    torch.manual_seed(0)
    if published:
        model_class = getattr(transformers, f"{published}ForConditionalGeneration")
        config = model_class.config_class(
            text_config=settings,
            vision_config=other | ({"model_type": "pixtral"} if published == "Mistral3" else {}),
            tie_word_embeddings=settings["tie_word_embeddings"],
        )
        model = model_class(config)
    else:
        config = transformers.Gemma3nConfig(text_config=settings)
        model = transformers.Gemma3nForCausalLM(config.text_config)
    for path, parameter in model.named_parameters():
        # Larger than usual, so that rounding hides no part; the decay of states remains stable.
        if not re.search(r"A_log|dt_bias", path):
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.eval().save_pretrained(directory)
    config.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = load_file(file) | {"mtp.fc.weight": torch.ones(32, 64)}  # for speculative decoding
    for pattern, new in renamed.items():
        tensors = {re.sub(pattern, new, path): value for path, value in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return model
