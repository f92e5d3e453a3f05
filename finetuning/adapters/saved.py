"""Read adapters exported by earlier runs, strictly in PEFT's format."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
# Accepted LoRA initialisations. With a different initialisation (PiSSA, OLoRA, …), PEFT changes the
# base model's weights whenever PEFT loads the adapter.
_PLAIN_INITIALISATIONS = (True, False, "gaussian")
_SHOWN = 4


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


def read_adapter(directory: Path) -> SavedAdapter:
    """Read an exported adapter: LoRA or a prefix, in PEFT's format.

    Raise an AdapterError if the folder contains no such adapter, or the adapter uses PEFT features
    that exported adapters do not have.
    """
    check_folder(directory)
    from peft import PeftConfig
    from safetensors.torch import load_file

    from finetuning.adapters.adapter import as_peft_config

    try:
        found: Any = PeftConfig.from_pretrained(str(directory))
        settings = _settings_of(found)
        expected = as_peft_config(settings).to_dict()
        values = found.to_dict()
        if values.get("init_lora_weights") in _PLAIN_INITIALISATIONS:
            expected["init_lora_weights"] = values["init_lora_weights"]
        different = {
            name: value
            for name, value in values.items()
            if name not in _INCIDENTAL and _plain(value) != _plain(expected.get(name))
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise AdapterError(f"{directory / _CONFIG} can't be read: {error}") from error
    if different:
        name, value = next(iter(sorted(different.items())))
        raise AdapterError(
            f"the adapter in {directory} has {name} = {value!r}; only plain LoRA and prefixes, as "
            "exported by runs, are supported; load other adapters with PEFT"
        )
    try:
        state = load_file(directory / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{directory / _WEIGHTS} can't be read: {error}") from error
    base = str(found.base_model_name_or_path or "")
    return SavedAdapter(directory=directory, settings=settings, state=state, base=base)


def read_fitting(directory: Path, settings: AdapterSettings, expected: "State") -> "State":
    """Read an exported adapter to start a run from.

    ``expected`` is an adapter of the run, with the required names and shapes. Raise an AdapterError
    if the folder contains no such adapter, or the adapter doesn't match the run's settings or base
    model.
    """
    found = read_adapter(directory)
    keys = ["kind"] if settings.kind == "prefix" else ["kind", "rank", "alpha"]
    for key in keys:
        theirs, ours = getattr(found.settings, key), getattr(settings, key)
        if theirs != ours:
            raise AdapterError(
                f"the adapter in {directory} has {key} {theirs}, but adapter.{key} = {ours}"
            )
    shapes, needed = (
        {name: tuple(value.shape) for name, value in state.items()}
        for state in (found.state, expected)
    )
    if different := sorted(dict(shapes.items() ^ needed.items())):
        raise AdapterError(
            f"the adapter in {directory} doesn't fit: {', '.join(different[:_SHOWN])} differ in "
            "name or shape; set model.name, and adapter.targets or adapter.prefix-length, to the "
            "values that the adapter was trained with"
        )
    return {name: value.float() for name, value in found.state.items()}


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
    if config.peft_type == "PREFIX_TUNING":
        return AdapterSettings(kind="prefix", prefix_length=config.num_virtual_tokens)
    if config.peft_type != "LORA":
        raise ValueError(f"{config.peft_type} is neither LORA nor PREFIX_TUNING")
    targets = config.target_modules
    names = targets if isinstance(targets, str) else ",".join(sorted(targets))
    return AdapterSettings(rank=config.r, alpha=config.lora_alpha, dropout=0.0, targets=names)


def _plain(value: Any) -> Any:
    """Normalise a value, so that equivalent representations compare equal."""
    if isinstance(value, list | tuple | set | frozenset):
        return sorted(map(str, value)) or None
    return value or None
