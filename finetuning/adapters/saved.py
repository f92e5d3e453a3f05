"""Read adapters exported by earlier runs, strictly in PEFT's format."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError

from finetuning.errors import UserError
from finetuning.settings import AdapterSettings

if TYPE_CHECKING:
    from finetuning.adapters.adapter import State

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
# Keys of an adapter's configuration that do not affect its output: notes, training settings, and
# values that PEFT reads from the base model.
_INCIDENTAL = {
    "auto_mapping",
    "base_model_name_or_path",
    "encoder_hidden_size",
    "fan_in_fan_out",
    "inference_mode",
    "lora_dropout",
    "num_attention_heads",
    "num_layers",
    "num_transformer_submodules",
    "peft_version",
    "revision",
    "task_type",
    "token_dim",
}
# Keys that select modules, whose names are then read from the adapter's tensors.
_SELECTING = {"layers_to_transform", "layers_pattern", "exclude_modules"}
_INCIDENTAL |= {*_SELECTING, "target_modules", "lora_alpha", "use_rslora"}
# Accepted LoRA initialisations.
_PLAIN_INITIALISATIONS = (True, False, "gaussian", "orthogonal")
# Why some features of PEFT aren't supported, by key, or by kind of initialisation.
_REASONS = {
    **dict.fromkeys(
        ("pissa", "olora", "loftq"),
        "it changes the base model's weights, so losses and digests would be wrong",
    ),
    **dict.fromkeys(
        ("rank_pattern", "alpha_pattern"),
        "programs that serve adapters ignore patterns, and so use a wrong scale",
    ),
    **dict.fromkeys(
        ("modules_to_save", "trainable_token_indices"),
        "whole matrices are large, and differ from those that they are tied to",
    ),
    **dict.fromkeys(("eva", "corda", "lora_ga"), "its factors come from private text"),
    **dict.fromkeys(("bias", "lora_bias"), "biases stay changed without the adapter"),
    "layer_replication": "it changes the number of blocks",
    "target_parameters": "experts have no gradients for each row",
    "use_dora": "the mean of DoRA's factors is not the mean of the models",
}
_SHOWN = 4
# Beginnings of tensors' names in models that also accept images or sound, in two versions.
_INSIDE = re.compile(r"^base_model\.model\.(model\.language_model|language_model\.model)\.")


class AdapterError(UserError, ValueError):
    """A folder does not contain a usable adapter; the message states the reason."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter of a whole model, with its tensors under PEFT's saved names.

    ``base`` is the base model named in the adapter: a Hugging Face id or a directory.
    """

    directory: Path
    settings: AdapterSettings
    state: "State"
    base: str

    @property
    def paths(self) -> list[str]:
        """Paths of the adapted modules in the model."""
        prefix = "base_model.model."
        return sorted({name.removeprefix(prefix).partition(".lora_")[0] for name in self.state})


def read_adapter(directory: Path) -> SavedAdapter:
    """Read an exported adapter: LoRA or a prefix, in PEFT's format.

    If it was trained in a model that also accepts images or sound, or exported for one, its names
    become those of the text model. Raise an AdapterError if the folder contains no such adapter, or
    the adapter uses features of PEFT that aren't supported.
    """
    check_folder(directory)
    from peft import PeftConfig
    from safetensors.torch import load_file

    from finetuning.adapters.adapter import as_peft_config

    try:
        config: Any = PeftConfig.from_pretrained(str(directory))
        settings = _settings_of(config)
        expected = as_peft_config(settings).to_dict()
        # PEFT drops the keys that it doesn't know.
        values = json.loads((directory / _CONFIG).read_text(encoding="utf-8")) | config.to_dict()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise AdapterError(f"{directory / _CONFIG} can't be read: {error}") from error
    if values.get("init_lora_weights") in _PLAIN_INITIALISATIONS:
        expected["init_lora_weights"] = values["init_lora_weights"]
    different = [
        (name, value, _REASONS.get(name) or _REASONS.get(str(value).partition("_niter")[0], ""))
        for name, value in values.items()
        if name not in _INCIDENTAL and _plain(value) != _plain(expected.get(name))
    ]
    if different:
        name, value, reason = max(different, key=lambda each: bool(each[2]))
        raise AdapterError(
            f"the adapter in {directory} has {name} = {value!r}, which is not supported"
            f"{f': {reason}' * bool(reason)}; only plain LoRA and prefixes are, so use PEFT itself"
        )
    try:
        loaded = load_file(directory / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{directory / _WEIGHTS} can't be read: {error}") from error
    base = str(config.base_model_name_or_path or "")
    state = {_INSIDE.sub("base_model.model.model.", name): value for name, value in loaded.items()}
    adapter = SavedAdapter(directory=directory, settings=settings, state=state, base=base)
    selecting = [values.get(key) for key in _SELECTING]
    if isinstance(values.get("target_modules"), str) or any(v not in (None, []) for v in selecting):
        settings = settings.model_copy(update={"targets": ",".join(adapter.paths)})
    return replace(adapter, settings=settings)


def read_fitting(directory: Path, settings: AdapterSettings, expected: "State") -> "State":
    """Read an exported adapter to start a run from.

    ``expected`` is an adapter of the run, with the required names and shapes. Raise an AdapterError
    if the folder contains no such adapter, or the adapter doesn't match the run's settings or base
    model.
    """
    adapter = read_adapter(directory)
    keys = ["kind"] if settings.kind == "prefix" else ["kind", "rank", "alpha"]
    for key in keys:
        value, required = getattr(adapter.settings, key), getattr(settings, key)
        if value != required:
            raise AdapterError(
                f"the adapter in {directory} has {key} {value}, but adapter.{key} = {required}"
            )
    shapes, needed = (
        {name: tuple(value.shape) for name, value in state.items()}
        for state in (adapter.state, expected)
    )
    if different := sorted(dict(shapes.items() ^ needed.items())):
        raise AdapterError(
            f"the adapter in {directory} doesn't fit: {', '.join(different[:_SHOWN])} differ in "
            "name or shape; set model.name, and adapter.targets or adapter.prefix-length, to the "
            "values that the adapter was trained with"
        )
    return {name: value.float() for name, value in adapter.state.items()}


def check_folder(directory: Path) -> None:
    """Raise an AdapterError if an adapter's files are missing, without importing PyTorch.

    The message names adapters found in subfolders.
    """
    missing = [name for name in (_CONFIG, _WEIGHTS) if not (directory / name).is_file()]
    if not missing:
        return
    if not directory.is_dir():
        raise AdapterError(f"there is no folder {directory}")
    folders = ("*", "adapters/*", "adapters/clients/*")
    inside = sorted(str(f.parent) for p in folders for f in directory.glob(f"{p}/{_CONFIG}"))
    hint = f"; did you mean {' or '.join(inside[:_SHOWN])}?" if inside else ""
    raise AdapterError(
        f"{directory} is not an adapter's folder: it has no {' and no '.join(missing)}{hint}"
    )


def _settings_of(config: Any) -> AdapterSettings:
    if config.peft_type not in {"PREFIX_TUNING", "LORA"}:
        raise ValueError(f"{config.peft_type} is neither LORA nor PREFIX_TUNING")
    try:
        if config.peft_type == "PREFIX_TUNING":
            return AdapterSettings(kind="prefix", prefix_length=config.num_virtual_tokens)
        targets = config.target_modules or []
        return AdapterSettings(
            rank=config.r,
            # Rank-stabilised LoRA multiplies by alpha / √r.
            alpha=config.lora_alpha * (config.r**0.5 if config.use_rslora else 1),
            dropout=0.0,
            targets="" if isinstance(targets, str) else ",".join(sorted(targets)),
        )
    except ValidationError as error:
        problem = error.errors()[0]
        keys = {"rank": "r", "alpha": "lora_alpha", "prefix-length": "num_virtual_tokens"}
        key = keys[str(problem["loc"][0])]
        raise ValueError(f"{key} = {problem['input']!r}: {problem['msg']}") from error


def _plain(value: Any) -> Any:
    """Normalise a value, so that equivalent representations compare equal."""
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(map(str, value)) or None
    return value or None
