"""Shared fixtures for split learning: small random checkpoints of many architectures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from finetuning.adapters.adapter import State, initial_adapter
from finetuning.model.backbone_inputs import left_padding
from finetuning.model.base_model import load_checkpoint, text_config
from finetuning.settings import ModelSettings
from split.model.loading import load_parts
from split.model.part import Part
from split.model.partition import PARTIES, Partition
from split.protocol.frames import Padding
from tests.conftest import WORDS
from tests.finetuning.conftest import EXPERTS, HYBRIDS, ROUTED
from tests.split.clients import ADAPTER
from tests.split.lanes import Server

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
# Configuration classes without "Config", and what differs from the common sizes. Windows are so
# short, and scales so far from 1, that a few tokens show whether they are right.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 4},
    "Mixtral": {"num_local_experts": 3},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 8},
    "Qwen2Moe": EXPERTS | {"mlp_only_layers": [1], "num_hidden_layers": 5},
    "Qwen3Moe": EXPERTS | {"decoder_sparse_step": 2, "head_dim": 8},
    "Glm": {"head_dim": 8},
    "Glm4": {"head_dim": 8},
    "Gemma": {"head_dim": 8},
    "Gemma2": {"head_dim": 8, "sliding_window": 4, "final_logit_softcapping": 0.5},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 4},
    "Phi3": {},
    "Olmo2": {},
    "GPTNeoX": {},
    "Starcoder2": {"embedding_dropout": 0.5},
    "Granite": {"embedding_multiplier": 12.0, "logits_scaling": 4.0},
    "SmolLM3": {"num_hidden_layers": 8},
    "Cohere": {"logit_scale": 0.25},
    "GPT2": {"n_inner": 48, "scale_attn_by_inverse_layer_idx": True},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "Bloom": {},
    "Olmo": {},
    "GptOss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 4},
    "Apertus": {},
    "Olmo3": {"sliding_window": 4},
    "Glm4Moe": ROUTED | {"head_dim": 8, "use_qk_norm": True},
    "DeepseekV3": ROUTED
    | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    | {"v_head_dim": 8, "num_key_value_heads": 4},
    # In four blocks, only the third has attention.
    **{
        name: given | {k: [v[0], *v, v[0]] for k, v in given.items() if k == "layer_types"}
        for name, given in HYBRIDS.items()
    },
}
LENGTHS = torch.tensor([11, 7, 4])


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a cached function that saves a small random causal language model."""
    made: dict[str, Path] = {}

    def make(architecture: str = "Llama", shards: str = "1GB", **changes: Any) -> Path:
        key = f"{architecture} {shards} {sorted(changes.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp(architecture)
            kind = getattr(transformers, f"{architecture}Config")
            # No dropout of the model's own where a test doesn't ask for it.
            names = ["attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout"]
            dropouts = dict.fromkeys([*names, "hidden_dropout"], 0.0)
            config = kind(**(SIZES | dropouts | ARCHITECTURES[architecture] | changes))
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
            # Larger than is usual, so that no part's influence is lost in rounding.
            for parameter in model.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
            model.save_pretrained(made[key], max_shard_size=shards)
        return made[key]

    return make


def whole_model(directory: Path) -> Any:
    """Load a whole model, frozen, with the same memory alignment as the parts.

    Rounding in matrix products depends on memory alignment, which is arbitrary in a mapped file.
    """
    model = load_checkpoint(directory, dtype="auto").requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def load_all(directory: Path, head: int, tail: int, **settings: Any) -> dict[str, Part]:
    """Load the three parts of a checkpoint."""
    blocks = text_config(directory).num_hidden_layers
    settings = ModelSettings(name=str(directory), **settings)
    return load_parts(settings, directory, Partition(blocks, head, tail), PARTIES, ["cpu"])


def draw_tokens(seed: int = 0) -> torch.Tensor:
    """Draw three rows of tokens; ``LENGTHS`` contains their lengths without padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (3, 11), generator=generator)


def real_tokens(side: str) -> torch.Tensor:
    """Return a mask that is true where a drawn token is not padding."""
    columns = torch.arange(11)
    return columns < LENGTHS[:, None] if side == "right" else columns >= 11 - LENGTHS[:, None]


def whole_logits(model: Any, tokens: torch.Tensor, side: str = "right") -> torch.Tensor:
    """Return the logits of the tokens that aren't padding, (tokens, vocabulary)."""
    causal_lm = getattr(model, "get_base_model", lambda: model)()
    inputs = left_padding(causal_lm.base_model, LENGTHS, 11) if side == "left" else {}
    logits = model(input_ids=tokens, use_cache=False, **inputs).logits
    return logits[real_tokens(side)]


def split_logits(parts: dict[str, Part], tokens: torch.Tensor, side: str = "right") -> torch.Tensor:
    """Return the same logits, computed by the three parts."""
    given = tokens
    for party in PARTIES:
        given = parts[party](given, Padding(side, LENGTHS))
    logits = parts["tail"].output_head(inputs_embeds=given, use_cache=False).logits
    return logits[real_tokens(side)]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a random Llama of six blocks, with a tokenizer of a few words."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("six-blocks")
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(directory)
    words = {word: number for number, word in enumerate(["<pad>", "<end>", *WORDS])}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words)), pad_token="<pad>", eos_token="<end>"
    ).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def beginning(base: Path) -> State:
    """Return an adapter of ``base`` that already has an effect."""
    state, _ = initial_adapter(str(base), ADAPTER, 5)
    torch.manual_seed(6)
    return {name: 0.2 * torch.randn_like(value) for name, value in state.items()}


@pytest.fixture
def server() -> Any:
    """Yield a server whose lanes are served by the test."""
    made = Server()
    yield made
    made.stop()
