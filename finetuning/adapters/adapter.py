"""Attach adapters to a base model, exchange them as tensors, and save them in PEFT's format."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from finetuning.adapters.prefixes import SAVED, key_value_shape, refuse_without_prefix
from finetuning.devices import is_mixed_precision
from finetuning.errors import BaseModelError
from finetuning.files import copy_matching, replacing
from finetuning.model.base_model import load_checkpoint, outline
from finetuning.model.locating import locate
from finetuning.model.names import public_name
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import AdapterSettings

State = dict[str, torch.Tensor]

_EXPERTS = (
    "it names experts or a router, whose matrices can't be adapted (nor can other layers of the "
    'same name); name only layers that all tokens pass through, or use "all-linear"'
)
# Name, within the model, of the parameter that PEFT saves as ``prompt_embeddings``.
_PREFIX = "prompt_encoder.default.embedding.weight"


def attach_adapter(
    model: Any,
    settings: AdapterSettings,
    base: str | None,
    name: str = "default",
    excluded: Sequence[str] = (),
) -> Any:
    """Wrap a base model with an adapter whose weights are float32 and require gradients.

    The model is a ``transformers`` causal language model, which is changed in place, or a PEFT
    model that already has adapters. ``base`` is the base model's name, which the saved adapter
    records. ``name`` is the adapter's name within the model and must not contain dots.
    Modules with ``excluded`` paths are not adapted even if a target matches their name. Raise a
    BaseModelError if the architecture does not support the targets or prefixes.
    """
    from peft import PeftModel, get_peft_model
    from peft.tuners.lora import LoraLayer

    config = as_peft_config(settings, excluded)
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = get_peft_model(model, config, adapter_name=name)
        # PEFT has replaced the names of modules that transformers fuses to the experts' matrices.
        if getattr(config, "target_parameters", None):
            raise ValueError(_EXPERTS)
        config.base_model_name_or_path = base  # PEFT sets the folder that it was loaded from
    except ValueError as error:
        reason = _EXPERTS if "ParamWrapper" in str(error) else error
        setting = f'adapter.targets = "{settings.targets}"'
        if settings.kind == "prefix":
            setting = 'adapter.kind = "prefix"'
        raise BaseModelError(f"{setting} does not fit this model: {reason}") from error
    if is_mixed_precision(model.device, model.dtype):
        # All computation is in bfloat16, so PEFT need not convert the inputs to float32 first.
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.cast_input_dtype_enabled = False
    return model


def as_peft_config(settings: AdapterSettings, excluded: Sequence[str] = ()) -> Any:
    """Convert settings to PEFT's configuration; see `attach_adapter` for the arguments."""
    from peft import LoraConfig, PrefixTuningConfig, TaskType

    task = TaskType.CAUSAL_LM
    if settings.kind == "prefix":
        return PrefixTuningConfig(
            num_virtual_tokens=settings.prefix_length, prefix_projection=False, task_type=task
        )
    return LoraConfig(
        r=settings.rank,
        lora_alpha=int(settings.alpha) if settings.alpha.is_integer() else settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=target_names(settings) or None,
        exclude_modules=list(excluded) or None,
        task_type=task,
    )


def target_names(settings: AdapterSettings) -> list[str]:
    """Return the names of the modules to adapt, or an empty list if PEFT chooses the modules."""
    return [name.strip() for name in settings.targets.split(",") if name.strip()]


@one_at_a_time()
def initial_adapter(
    name: str, settings: AdapterSettings, seed: int, directory: Path | None = None
) -> tuple[State, Any]:
    """Create the global adapter of round 1, normally without reading the base model's weights.

    One of LoRA's two matrices is zero, so the adapter initially has no effect. Prefixes are random,
    as in PEFT, unless the settings contain an initial text: then the whole model is loaded to
    compute the prefix. ``directory`` contains the configuration; if None, ``name`` is located.

    Return the adapter's float32 tensors, and its PEFT configuration with explicit targets. Raise a
    BaseModelError if the model does not exist, or does not support the targets or prefixes.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    prefix = settings.kind == "prefix"
    # In a split model, a party's directory may contain only the files of its blocks.
    if directory is None or (prefix and settings.initial_text):
        directory = locate(name)
    model = outline(directory).to(torch.bfloat16)
    with torch.device("meta"):
        if prefix:
            refuse_without_prefix(model, settings.prefix_length)
        peft_model = attach_adapter(model, settings, public_name(name))
    peft_config = peft_model.peft_config["default"]
    if prefix:
        _refuse_other_shape(model, peft_config)
        if settings.initial_text:
            return {SAVED: _prefix_of_text(directory, settings)}, peft_config
        generator = torch.Generator().manual_seed(seed)
        columns = 2 * peft_config.num_layers * peft_config.token_dim
        values = torch.randn(settings.prefix_length, columns, generator=generator)
        return {SAVED: values}, peft_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in peft_model.modules():
            if isinstance(module, BaseTunerLayer):
                for part in module.adapter_layer_names:
                    getattr(module, part).to_empty(device="cpu")
                module.reset_lora_parameters("default", init_lora_weights=True)
    return export_adapter(peft_model), peft_config


def _refuse_other_shape(model: Any, peft_config: Any) -> None:
    heads = peft_config.num_attention_heads
    shape = (peft_config.num_layers, heads, peft_config.token_dim // heads)
    if shape != (model.config.num_hidden_layers, *key_value_shape(model.config)):
        raise BaseModelError(
            f'adapter.kind = "prefix" does not support {type(model).__name__}: PEFT\'s prefixes '
            f'have the shape {shape}, which does not fit its blocks; use adapter.kind = "lora"'
        )


@torch.no_grad()
def _prefix_of_text(directory: Path, settings: AdapterSettings) -> torch.Tensor:
    """Return the keys and values of the initial text, (length, blocks · 2 · heads · width).

    With this prefix, the model computes as if the text, cut or repeated, preceded its input.
    """
    length = settings.prefix_length
    tokens = load_tokenizer(directory)(settings.initial_text)["input_ids"]
    if not tokens:
        raise BaseModelError("adapter.initial-text has no tokens; use a longer text")
    repeated = torch.tensor([(tokens * length)[:length]])
    model = load_checkpoint(directory, dtype=torch.float32)
    layers = model.eval()(repeated, use_cache=True).past_key_values.layers
    parts = [part for layer in layers for part in (layer.keys, layer.values)]
    if any(part.shape[2] != length for part in parts):
        raise BaseModelError(
            "adapter.initial-text is not supported: a block of this model caches fewer tokens than "
            f"adapter.prefix-length = {length}; use a shorter prefix"
        )
    return torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts], dim=1)


def trainable_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters, keyed by name in the model, in a fixed order."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@contextmanager
def training_only(peft_model: Any, names: Collection[str]) -> Iterator[None]:
    """Freeze the adapter's other weights within the context; ``names`` are PEFT's saved ones."""
    exported = exported_names(peft_model)
    frozen = [p for n, p in trainable_parameters(peft_model).items() if exported[n] not in names]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def exported_names(peft_model: Any) -> dict[str, str]:
    """Map the names of a model's trainable parameters to those in PEFT's saved format."""
    return {
        name: SAVED if name == _PREFIX else name.replace(".default", "")
        for name in trainable_parameters(peft_model)
    }


def export_adapter(peft_model: Any) -> State:
    """Copy the adapter to float32 tensors in CPU memory, under PEFT's saved names.

    The copies share no storage with the model or with each other.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(peft_model, save_embedding_layers=False)
    return {
        name: value.detach().to("cpu", torch.float32, copy=True).contiguous()
        for name, value in sorted(state.items())
    }


def load_adapter(peft_model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Set the adapter's weights; see `load_state`."""
    names = exported_names(peft_model)
    load_state({names[n]: p for n, p in trainable_parameters(peft_model).items()}, state)


@torch.no_grad()
def load_state(
    parameters: Mapping[str, torch.nn.Parameter], state: Mapping[str, torch.Tensor]
) -> None:
    """Set weights by name; if names or shapes differ, raise a ValueError and set no weights."""
    if set(state) != set(parameters):
        different = sorted(set(state) ^ set(parameters))
        raise ValueError(f"the tensors' names differ from this model's adapter: {different[:3]} …")
    for name, parameter in parameters.items():
        if state[name].shape != parameter.shape:
            shapes = tuple(state[name].shape), tuple(parameter.shape)
            raise ValueError(f"{name} has shape {shapes[0]}, not {shapes[1]}")
    for name, parameter in parameters.items():
        parameter.copy_(state[name])


# Files of a tokenizer, and the chat template, in a checkpoint.
_TOKENIZER = "tokenizer* chat_template* special_tokens_map.json added_tokens.json vocab* merges*"


def save_adapter(
    directory: Path,
    state: Mapping[str, torch.Tensor] | Path,
    config: Any,
    card: str,
    checkpoint: Path | None = None,
) -> None:
    """Write an adapter that ``PeftModel.from_pretrained(base, directory)`` can load.

    The folder is replaced atomically. ``state`` maps PEFT's saved names to tensors, or is a
    safetensors file on the same disk, which is moved to the folder.
    ``config`` is PEFT's configuration of the adapter, and ``card`` the text of README.md. The
    tokenizer and chat template in the folder ``checkpoint`` are copied.
    """
    with replacing(directory) as aside:
        aside.mkdir(parents=True)
        if checkpoint is not None:
            copy_matching(checkpoint, _TOKENIZER.split(), aside)
        file = aside / "adapter_model.safetensors"
        if isinstance(state, Path):
            state.rename(file)
        else:
            save_file(dict(state), file, metadata={"format": "pt"})
        config.save_pretrained(aside)
        (aside / "README.md").write_text(card, encoding="utf-8")
