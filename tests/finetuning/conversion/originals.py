"""Small checkpoints in the formats of the original models, and those models in float64.

The computations follow the models' descriptions and use only NumPy.
"""

import json
import math

import numpy as np
import torch

BAICHUAN = {
    "architectures": ["BaiChuanForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaiChuanForCausalLM"},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "model_type": "baichuan",
    "num_attention_heads": 3,
    "num_hidden_layers": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "vocab_size": 640,
}
CHATGLM = {
    "_name_or_path": "THUDM/chatglm3-6b",
    "model_type": "chatglm",
    "architectures": ["ChatGLMModel"],
    "auto_map": {"AutoModel": "modeling_chatglm.ChatGLMForConditionalGeneration"},
    "add_bias_linear": False,
    "add_qkv_bias": True,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "attention_softmax_in_fp32": True,
    "ffn_hidden_size": 80,
    "hidden_size": 48,
    "kv_channels": 8,
    "layernorm_epsilon": 1e-5,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "num_attention_heads": 6,
    "num_layers": 4,
    "original_rope": True,
    "padded_vocab_size": 640,
    "post_layer_norm": True,
    "rmsnorm": True,
    "seq_length": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def baichuan_shapes(config):
    """Return the names and shapes of Baichuan-7B's tensors at a small size."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.W_pack.weight": (3 * hidden, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, hidden),
            prefix + "self_attn.rotary_emb.inv_freq": (
                hidden // config["num_attention_heads"] // 2,
            ),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }


def chatglm_shapes(config):
    """Return the names and shapes of ChatGLM2's and ChatGLM3's tensors at a small size."""
    hidden, inner = config["hidden_size"], config["ffn_hidden_size"]
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    queries, keys = heads * config["kv_channels"], groups * config["kv_channels"]
    shapes = {
        "transformer.embedding.word_embeddings.weight": (config["padded_vocab_size"], hidden),
        "transformer.rotary_pos_emb.inv_freq": (config["kv_channels"] // 4,),
        "transformer.encoder.final_layernorm.weight": (hidden,),
        "transformer.output_layer.weight": (config["padded_vocab_size"], hidden),
    }
    for layer in range(config["num_layers"]):
        prefix = f"transformer.encoder.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attention.query_key_value.weight": (queries + 2 * keys, hidden),
            prefix + "self_attention.query_key_value.bias": (queries + 2 * keys,),
            prefix + "self_attention.dense.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.dense_h_to_4h.weight": (2 * inner, hidden),
            prefix + "mlp.dense_4h_to_h.weight": (hidden, inner),
        }
    return shapes


def draw(shapes, seed=0):
    """Return random tensors, large enough that every part matters."""
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(directory, config, tensors, files=2):
    """Write a checkpoint in PyTorch's format, in several files."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"pytorch_model-{number + 1:05d}-of-{files:05d}.bin"
        own = {name: tensors[name] for name in names[number::files]}
        torch.save(own, directory / file)
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return directory


def baichuan_logits(tensors, config, ids, normalised_head=False):
    """Return Baichuan's logits, (tokens, vocabulary)."""
    value = _float64(tensors)
    heads = config["num_attention_heads"]
    size = config["hidden_size"] // heads
    x = value["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        own = f"model.layers.{layer}."
        normed = _rms(x, value[own + "input_layernorm.weight"], config["rms_norm_eps"])
        fused = normed @ value[own + "self_attn.W_pack.weight"].T
        query, key, values = fused.reshape(len(ids), 3, heads, size).transpose(1, 2, 0, 3)
        query, key = _rotate_halves(query), _rotate_halves(key)
        x = x + _attend(query, key, values) @ value[own + "self_attn.o_proj.weight"].T
        normed = _rms(x, value[own + "post_attention_layernorm.weight"], config["rms_norm_eps"])
        gate = _silu(normed @ value[own + "mlp.gate_proj.weight"].T)
        up = normed @ value[own + "mlp.up_proj.weight"].T
        x = x + (gate * up) @ value[own + "mlp.down_proj.weight"].T
    head = value["lm_head.weight"]
    if normalised_head:
        head = head / np.linalg.norm(head, axis=1, keepdims=True)
    return _rms(x, value["model.norm.weight"], config["rms_norm_eps"]) @ head.T


def chatglm_logits(tensors, config, ids):
    """Return ChatGLM2's and ChatGLM3's logits, (tokens, vocabulary)."""
    value = _float64(tensors)
    heads, groups = config["num_attention_heads"], config["multi_query_group_num"]
    size, epsilon = config["kv_channels"], config["layernorm_epsilon"]
    base = 10000 * config.get("rope_ratio", 1)
    x = value["transformer.embedding.word_embeddings.weight"][ids]
    for layer in range(config["num_layers"]):
        own = f"transformer.encoder.layers.{layer}."
        normed = _rms(x, value[own + "input_layernorm.weight"], epsilon)
        fused = normed @ value[own + "self_attention.query_key_value.weight"].T
        fused = fused + value[own + "self_attention.query_key_value.bias"]
        fused = fused.reshape(len(ids), heads + 2 * groups, size).transpose(1, 0, 2)
        query, key, values = np.split(fused, [heads, heads + groups])
        query, key = _rotate_pairs(query, base), _rotate_pairs(key, base)
        key, values = (np.repeat(part, heads // groups, axis=0) for part in (key, values))
        x = x + _attend(query, key, values) @ value[own + "self_attention.dense.weight"].T
        normed = _rms(x, value[own + "post_attention_layernorm.weight"], epsilon)
        gate, up = np.split(normed @ value[own + "mlp.dense_h_to_4h.weight"].T, 2, axis=1)
        x = x + (_silu(gate) * up) @ value[own + "mlp.dense_4h_to_h.weight"].T
    x = _rms(x, value["transformer.encoder.final_layernorm.weight"], epsilon)
    return x @ value["transformer.output_layer.weight"].T


def _float64(tensors):
    return {name: tensor.double().numpy() for name, tensor in tensors.items()}


def _rms(x, weight, epsilon):
    return weight * x / np.sqrt((x**2).mean(axis=1, keepdims=True) + epsilon)


def _silu(x):
    return x / (1 + np.exp(-x))


def _attend(query, key, values):
    """Attend causally; inputs are (heads, tokens, size), the result is (tokens, heads * size)."""
    scores = query @ key.transpose(0, 2, 1) / math.sqrt(query.shape[2])
    scores[:, ~np.tri(query.shape[1], dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return (weights @ values).transpose(1, 0, 2).reshape(query.shape[1], -1)


def _rotate_halves(x):
    """Rotate the pair of dimension i and i + size/2 of each head by position / 10000^(2i/size)."""
    size = x.shape[2]
    angles = np.outer(np.arange(x.shape[1]), 10000.0 ** (-2 * np.arange(size // 2) / size))
    first, second = x[..., : size // 2], x[..., size // 2 :]
    return np.concatenate(
        [
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ],
        axis=2,
    )


def _rotate_pairs(x, base):
    """Rotate neighbours 2i and 2i + 1 in the first half of each head; copy the second half."""
    size = x.shape[2] // 2
    angles = np.outer(np.arange(x.shape[1]), float(base) ** (-2 * np.arange(size // 2) / size))
    pairs = x[..., :size].reshape(*x.shape[:2], size // 2, 2)
    complex_pairs = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    rotated = np.stack([complex_pairs.real, complex_pairs.imag], axis=3).reshape(*x.shape[:2], size)
    return np.concatenate([rotated, x[..., size:]], axis=2)
