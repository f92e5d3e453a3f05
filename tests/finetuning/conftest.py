"""Shared fixtures for fine-tuning: small random models, adapters, examples and references."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.batching import MicroBatch, collate, micro_batches
from finetuning.data.tokenization import Example
from finetuning.model.base_model import BaseModel, load_base_model
from finetuning.settings import AdapterSettings, ModelSettings

VOCABULARY = 64

# Architectures that end in different ways: capped or scaled logits, tied heads, learned positions.
# Each entry has the configuration class, differences from ``SIZES``, and the adapted modules.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
PROJECTIONS = "q_proj,k_proj,v_proj"
INPUTS = "q_proj,in_proj,in_proj_qkv,in_proj_qkvz"  # of attention and of recurrent layers
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4}
# Architectures with recurrent or convolution layers, and what differs from the common sizes.
HYBRIDS: dict[str, dict[str, Any]] = {
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybrid": MAMBA
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    | {"mamba_d_head": 16, "embedding_multiplier": 12.0, "logits_scaling": 4.0}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "FalconH1": MAMBA | {"mamba_d_ssm": 32, "mamba_d_head": 8, "lm_head_multiplier": 0.5},
    "Qwen3Next": DELTA | EXPERTS | {"layer_types": ["linear_attention", "full_attention"]},
    "Qwen3_5Text": DELTA | {"layer_types": ["linear_attention", "full_attention"]},
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, PROJECTIONS),
    "mixtral": ("MixtralConfig", {"num_local_experts": 3}, PROJECTIONS),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, PROJECTIONS),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "final_logit_softcapping": 0.5, "sliding_window": 8},
        PROJECTIONS,
    ),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}, PROJECTIONS),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}, PROJECTIONS),
    "gpt2": ("GPT2Config", {"n_inner": 48}, "c_attn"),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 16}, PROJECTIONS),
    "bloom": ("BloomConfig", {}, "query_key_value"),
    **{name: (f"{name}Config", given, INPUTS) for name, given in HYBRIDS.items()},
}


@pytest.fixture
def random_model() -> Callable[..., Any]:
    """Return a function that creates a small random causal language model."""

    def make(architecture: str = "llama", seed: int = 0, **changes: Any) -> Any:
        import transformers

        kind, differences, _ = ARCHITECTURES[architecture]
        # Disable the models' dropout, so that the only dropout is the adapter's.
        names = ["attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout", "attention_dropout"]
        dropouts = dict.fromkeys([*names, "hidden_dropout"], 0.0)
        config = getattr(transformers, kind)(**(SIZES | dropouts | differences | changes))
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        # Use unusually large weights, so that rounding hides no part's influence.
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.config._name_or_path = model.name_or_path = "base"
        return model.requires_grad_(False)

    return make


def draw_weights(model: Any, scale: float = 1.0, seed: int = 1) -> Any:
    """Draw an adapter's weights, so that it has an effect; return the model."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in trainable_parameters(model).values():
        drawn = scale * torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter.device)
    return model


@pytest.fixture
def base(checkpoint: Path) -> BaseModel:
    """Load the small checkpoint again, because attaching an adapter changes a model in place."""
    return load_base_model(ModelSettings(name=str(checkpoint)))


@pytest.fixture
def adapted(random_model: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that creates a small model with an adapter that already has an effect."""

    def make(
        architecture: str = "llama", seed: int = 0, dropout: float = 0.0, **changes: Any
    ) -> Any:
        settings = AdapterSettings(
            rank=2, alpha=4, dropout=dropout, targets=ARCHITECTURES[architecture][2]
        )
        model = attach_adapter(random_model(architecture, seed, **changes), settings, "base")
        return draw_weights(model, 0.2, seed + 1)

    return make


@pytest.fixture
def draw_examples() -> Callable[..., list[Example]]:
    """Return a function that draws examples of unequal lengths with unequal shares of targets."""

    def draw(count: int, seed: int = 0, longest: int = 20) -> list[Example]:
        generator = torch.Generator().manual_seed(seed)
        examples = []
        for row in range(count):
            length = int(torch.randint(4, longest + 1, (), generator=generator))
            prompt = int(torch.randint(1, length - 1, (), generator=generator))
            tokens = torch.randint(2, VOCABULARY, (length,), generator=generator)
            is_target = torch.arange(length) >= prompt
            # Tokens after an answer within a conversation are no targets.
            is_target[length - 2] = bool(torch.randint(2, (), generator=generator))
            examples.append(Example(tokens, is_target, prompt, "", row))
        return examples

    return draw


@pytest.fixture
def reference_loss() -> Callable[..., torch.Tensor]:
    """Return a function that computes the mean loss per target as ``transformers`` does."""

    def loss(model: Any, examples: Sequence[Example]) -> torch.Tensor:
        def pad(rows: list[torch.Tensor], value: int) -> torch.Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        labels = [e.tokens.where(e.is_target, -100) for e in examples]
        return model(
            input_ids=pad([e.tokens for e in examples], 0),
            attention_mask=pad([torch.ones_like(e.tokens) for e in examples], 0),
            labels=pad(labels, -100),
        ).loss

    return loss


@pytest.fixture
def batches_of() -> Callable[..., list[MicroBatch]]:
    """Return a function that divides examples into padded micro-batches under a token budget."""

    def divide(examples: Sequence[Example], budget: int) -> list[MicroBatch]:
        lengths = [len(example.tokens) for example in examples]
        groups = micro_batches(range(len(examples)), lengths, budget)
        return [collate([examples[i] for i in group], 0) for group in groups]

    return divide
