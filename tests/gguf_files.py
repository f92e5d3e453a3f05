"""Write GGUF files with the weights and the tokenizer of a small Llama checkpoint."""

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from safetensors.numpy import load_file
from sentencepiece import SentencePieceProcessor

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.layers": "blk",
}


def write_gguf(
    checkpoint: Path,
    file: Path,
    kind: str = "F32",
    architecture: str = "llama",
    left_out: str = "",
    chat_template: str = "",
    sentencepiece: Path | None = None,
    scales_positions: bool = False,
) -> Path:
    """Write a Llama checkpoint as a GGUF file.

    Args:
        checkpoint: Directory of the checkpoint.
        file: The file.
        kind: GGUF's name for the type of all matrices.
        architecture: Name of the architecture that the file claims.
        left_out: GGUF's name of a tensor to omit.
        chat_template: Chat template; empty for none.
        sentencepiece: SentencePiece model that replaces the checkpoint's tokenizer.
        scales_positions: Whether the file contains rotary scaling factors, as Llama 3.1's do.

    """
    config = json.loads((checkpoint / "config.json").read_text())
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if sentencepiece:
        _add_sentencepiece(writer, SentencePieceProcessor(model_file=str(sentencepiece)))
    else:
        _add_tokenizer(writer, json.loads((checkpoint / "tokenizer.json").read_text()))
    if chat_template:
        writer.add_chat_template(chat_template)
    for name, value in load_file(checkpoint / "model.safetensors").items():
        own = name
        for theirs, ours in _NAMES.items():
            own = own.replace(theirs, ours)
        # llama.cpp rotates adjacent rows of a head; transformers pairs rows of its two halves.
        for part, count in (("attn_q", heads), ("attn_k", shared)):
            if part in own:
                halves = value.reshape(count, 2, value.shape[0] // count // 2, value.shape[1])
                value = halves.swapaxes(1, 2).reshape(value.shape)  # noqa: PLW2901
        if own == left_out:
            continue
        stored = GGMLQuantizationType[kind if value.ndim > 1 else "F32"]
        writer.add_tensor(own, quantize(np.ascontiguousarray(value), stored), raw_dtype=stored)
    if scales_positions:
        writer.add_tensor("rope_freqs.weight", np.full(4, 8.0, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict) -> None:
    special = {token["content"] for token in tokenizer["added_tokens"]}
    words = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    kinds = [TokenType.CONTROL if word in special else TokenType.NORMAL for word in words]
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)


def _add_sentencepiece(writer: GGUFWriter, tokenizer: SentencePieceProcessor) -> None:
    pieces = range(tokenizer.vocab_size())
    kinds = []
    for piece in pieces:
        if tokenizer.is_control(piece):
            kinds.append(TokenType.CONTROL)
        elif tokenizer.is_unknown(piece):
            kinds.append(TokenType.UNKNOWN)
        else:
            kinds.append(TokenType.BYTE if tokenizer.is_byte(piece) else TokenType.NORMAL)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([tokenizer.id_to_piece(piece) for piece in pieces])
    writer.add_token_scores([tokenizer.get_score(piece) for piece in pieces])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokenizer.bos_id())
    writer.add_eos_token_id(tokenizer.eos_id())
    writer.add_add_bos_token(True)
