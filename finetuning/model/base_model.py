"""Load and check the frozen base model."""

import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch

from finetuning.devices import default_device, default_dtype
from finetuning.errors import BaseModelError
from finetuning.model.checkpoint import refuse_missing_shards, refuse_quantized
from finetuning.model.locating import locate
from finetuning.model.names import public_name
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.model.placement import accelerators, device_map, hand_over, path_of_blocks
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import ModelSettings

# Names of a text model's tensors in checkpoints of models that also accept images or sound.
# ``transformers`` reverses these patterns, so they must not contain groups.
TEXT_TENSORS = {
    r"^language_model\.lm_head": "lm_head",
    r"^language_model\.model": "model",
    r"^model\.language_model": "model",
}
# Text models without a class of their own, and the types whose blocks are the same.
_SAME_BLOCKS = {
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
# Maximum of (change in earlier logits ÷ change in last logits) when the last token is changed.
_CAUSAL_CHANGE = 0.2

# `refuse_incomplete` names tensors that don't fit; a text model leaves out those for images.
logging.getLogger("transformers.modeling_utils").addFilter(
    lambda record: "LOAD REPORT" not in record.getMessage()
)
# PEFT and this file use names that transformers 5 deprecates and transformers 6 will remove.
warnings.filterwarnings("ignore", r"`(is_)?gradient_checkpointing", FutureWarning)


@dataclass(frozen=True)
class BaseModel:
    """A loaded checkpoint: a ``transformers`` model with frozen weights, and its tokenizer.

    ``reference`` is the name that saved adapters record; see `public_name`.
    """

    model: Any
    tokenizer: Any
    directory: Path
    reference: str


@one_at_a_time()
def load_base_model(settings: ModelSettings) -> BaseModel:
    """Load the settings' checkpoint with frozen weights, on an accelerator if there is one.

    Raise a BaseModelError if the checkpoint can't be found or loaded, or isn't a causal text model.
    """
    directory = locate(settings.name)
    arguments = loading_arguments(settings)
    if settings.devices == "all" and len(devices := accelerators()) > 1:
        whole = outline(directory)
        if path := path_of_blocks(whole, whole.config.num_hidden_layers):
            arguments["device_map"] = device_map(whole, path, devices)
    model = load_checkpoint(directory, **arguments)
    hand_over(model, arguments["device_map"])
    freeze(model, settings)
    refuse_unless_causal(model, directory)
    tokenizer, named = load_tokenizer(directory), public_name(settings.name)
    return BaseModel(model=model, tokenizer=tokenizer, directory=directory, reference=named)


def text_config(directory: Path) -> Any:
    """Read the configuration of a checkpoint's model, or of its part that accepts only text.

    Raise a BaseModelError if the architecture is unknown, or has no causal language model.
    """
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        PretrainedConfig,
        __version__,
    )

    whole: Any = None
    text: Any = None
    try:
        kind = PretrainedConfig.get_config_dict(directory)[0].get("model_type")
        if kind in CONFIG_MAPPING:
            whole = AutoConfig.from_pretrained(directory, trust_remote_code=False)
            text = whole.get_text_config()
            if same := _SAME_BLOCKS.get(text.model_type):
                text = CONFIG_MAPPING[same].from_dict(text.to_dict() | {"model_type": same})
    except Exception as error:  # configurations check themselves in many ways
        raise _not_loaded(directory / "config.json", error) from error
    if text is None or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise BaseModelError(
            f"the model in {directory} has no class for causal language models in transformers "
            f'{__version__} (model_type "{kind}"); use a different base model, or convert this one '
            "(docs/models.md)"
        )
    if text is not whole:
        for name in ("eos_token_id", "_name_or_path"):
            if not getattr(text, name, None) and hasattr(whole, name):
                setattr(text, name, getattr(whole, name))
        both = (text, whole)
        text.tie_word_embeddings = any(getattr(c, "tie_word_embeddings", False) for c in both)
    return text


@one_at_a_time()
def outline(directory: Path) -> Any:
    """Build a checkpoint's causal language model without memory for its weights.

    Raise a BaseModelError if the architecture is unknown, or is not a causal language model.
    """
    from transformers import AutoModelForCausalLM

    config = text_config(directory)
    try:
        with torch.device("meta"):
            return _with_backbone(AutoModelForCausalLM.from_config(config))
    except Exception as error:
        raise _not_loaded(directory / "config.json", error) from error


def load_checkpoint(directory: Path, **arguments: Any) -> Any:
    """Load a checkpoint's model with arguments of ``from_pretrained``.

    Raise a BaseModelError if it can't be loaded, lacks tensors, or was saved quantised.
    """
    from transformers import AutoModelForCausalLM

    config = text_config(directory)
    refuse_quantized(directory)
    refuse_missing_shards(directory)
    if arguments.get("quantization_config") and hasattr(config, "altup_coef_clip"):
        # Gemma 3n limits these modules' weights in training.
        own = ["lm_head", "prediction_coefs", "correction_coefs"]
        arguments["quantization_config"].llm_int8_skip_modules = own
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            key_mapping=TEXT_TENSORS,
            ignore_mismatched_sizes=True,  # `refuse_incomplete` names them
            trust_remote_code=False,
            output_loading_info=True,
            generation_config=generation_settings(directory, config),
            **arguments,
        )
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise  # the checkpoint is not the problem
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _not_loaded(directory, error) from error
    refuse_incomplete(report, f"the checkpoint in {directory}, as a {type(model).__name__},")
    return _with_backbone(model)


def refuse_incomplete(report: Mapping[str, Any], what: str) -> None:
    """Raise a BaseModelError if a report of ``from_pretrained`` names tensors that don't fit.

    These would be initialised randomly, with different values in each process.
    """
    problem = ""
    if missing := sorted(report["missing_keys"]):
        problem = f"lacks {len(missing)} tensors, including {', '.join(missing[:3])}"
    for name, shape, expected in sorted(report["mismatched_keys"])[:1]:
        problem = f"has {name} of shape {list(shape)} instead of {list(expected)}"
    if problem:
        raise BaseModelError(f"{what} {problem}; compare it with the published one")


def _not_loaded(path: Path, error: Exception) -> BaseModelError:
    name = "" if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: "
    reason = shorten(str(error), 300, placeholder=" …").rstrip(".")
    return BaseModelError(
        f"{path} can't be loaded: {name}{reason}; compare it with the published one"
    )


def _with_backbone(model: Any) -> Any:
    """Correct the name by which ``base_model`` finds the blocks, which is wrong for Llama 4."""
    if not hasattr(model, model.base_model_prefix):
        model.base_model_prefix = "model"
    return model


def generation_settings(directory: Path, config: Any) -> Any:
    """Return ``transformers``' defaults for generation, with the checkpoint's end-of-text tokens.

    Other settings in ``generation_config.json``, such as beams or limits, are not used. Raise a
    BaseModelError if the file can't be read.
    """
    from transformers import GenerationConfig

    file = directory / "generation_config.json"
    try:
        ends = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
        ends = config.get_text_config().eos_token_id if ends is None else ends
        torch.tensor([] if ends is None else ends).long()
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BaseModelError(f"{file}: the end-of-text token can't be read: {error}") from error
    return GenerationConfig(eos_token_id=ends)


def loading_arguments(settings: ModelSettings, device: str | None = None) -> dict[str, Any]:
    """Return ``from_pretrained``'s arguments for precision, device and quantisation.

    If the device is None, an accelerator is used if there is one. bitsandbytes quantises to
    QLoRA's double-quantised nf4, or with LLM.int8().
    """
    from transformers import BitsAndBytesConfig

    chosen = torch.device(device) if device else default_device()
    dtype = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "auto": default_dtype(chosen),
    }[settings.dtype]
    quantization = None
    if settings.quantization == "nf4":
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    elif settings.quantization == "int8":
        quantization = BitsAndBytesConfig(load_in_8bit=True)
    return {"dtype": dtype, "device_map": {"": chosen}, "quantization_config": quantization}


def freeze(model: Any, settings: ModelSettings) -> None:
    """Freeze a loaded model, and enable gradient checkpointing if the settings request it."""
    model.requires_grad_(False)
    if settings.quantization == "nf4" and model.device.type == "cpu":
        from bitsandbytes.nn import Linear4bit

        # On a processor with AVX512-BF16, bitsandbytes repacks a layer's weights on its first use
        # in evaluation mode. After that, no gradient passes through the layer, even in training
        # mode, and no error is raised.
        for module in model.modules():
            if isinstance(module, Linear4bit):
                module.support_avx512bf16_for_cpu = False
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})


@torch.no_grad()
def refuse_unless_causal(model: Any, directory: Path) -> None:
    """Raise a BaseModelError if tokens attend to later tokens.

    Training pads rows without an attention mask, which is correct only if attention is causal.
    """
    tokens = torch.tensor([[3, 5, 7, 9]], device=model.device)
    other = tokens.clone()
    other[0, -1] = 11
    model.eval()
    one, two = (model(input_ids=ids, use_cache=False).logits[0].float() for ids in (tokens, other))
    change = (one - two).abs().mean(dim=1)
    # Allow some change, because with quantisation a token's rounding depends on the other tokens.
    if change[:-1].max() > _CAUSAL_CHANGE * change[-1]:
        raise BaseModelError(
            f"the model in {directory} is not causal: tokens attend to later tokens, so it can't "
            "be fine-tuned to predict the next token; use a causal language model"
        )
