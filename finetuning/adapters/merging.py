"""Merge a LoRA adapter into its base model's weights."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from finetuning.adapters.adapter import State, attach_adapter, load_adapter
from finetuning.adapters.saved import AdapterError, SavedAdapter
from finetuning.errors import BaseModelError
from finetuning.files import copy_matching, replacing
from finetuning.model.base_model import load_checkpoint, loading_arguments, outline
from finetuning.model.checkpoint import INDEX, WEIGHTS
from finetuning.model.gguf_file import ORIGIN
from finetuning.model.locating import DESCRIPTIONS, fetch
from finetuning.model.names import is_id, resolve
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.model.tensor_names import full_names
from finetuning.settings import ModelSettings

_LICENCES = ("LICENSE*", "NOTICE*", "MODEL_LICENSE*")
# Files of a checkpoint that aren't copied: a different card is written, and there is no GGUF file.
_LEFT_OUT = {"README.md", ORIGIN}


def fetch_licence(name: str) -> None:
    """Download the licence and card of a model on the Hugging Face Hub, if it can be reached."""
    if is_id(resolve(name)):
        with suppress(BaseModelError):
            fetch(resolve(name), ("README.md", *_LICENCES))


@one_at_a_time()
def merge(adapter: SavedAdapter, directory: Path, dtype: str, quantization: str) -> State:
    """Load a base model, and add (alpha / rank) · B · A to each weight that the adapter adapts.

    The product is computed in float32 and rounded to ``dtype``; ``"auto"`` is the data type of the
    checkpoint in ``directory``. With a ``quantization``, all weights that it changes have the
    values that they have in the quantised model. Return the changed tensors by their names in the
    model, in CPU memory.

    Raise ``AdapterError`` if the adapter is for a different base model, or contains NaN. Raise
    ``BaseModelError`` if the checkpoint can't be loaded.
    """
    settings = ModelSettings.model_validate({"quantization": quantization})
    base = load_checkpoint(directory, **loading_arguments(settings, "cpu") | {"dtype": dtype})
    changed, output = {f"{path}.weight" for path in adapter.paths}, _output_layer(base)
    if quantization != "none":
        base = base.dequantize()
        linear = [name for name, module in base.named_modules() if type(module) is torch.nn.Linear]
        changed |= {f"{name}.weight" for name in linear} - {output}
    try:
        model = attach_adapter(base, adapter.settings, None)
        load_adapter(model, adapter.state)
    except ValueError as error:
        raise AdapterError(
            f"the adapter in {adapter.directory} is for a different base model: {error}"
        ) from error
    if _untie(model):
        changed.add(output)
    try:
        state = model.merge_and_unload(safe_merge=True).state_dict()
    except ValueError as error:  # the adapter contains NaN
        raise AdapterError(
            f"the adapter in {adapter.directory} can't be merged: {error}"
        ) from error
    return {name: state[name] for name in sorted(changed)}


def save_merged(changed: State, directory: Path, folder: Path, dtype: str, card: str) -> None:
    """Write a copy of a checkpoint with changed tensors, as `merge` returns them.

    ``directory`` is the base model's checkpoint. Its other tensors, also those of a part that
    accepts images or sound, are only converted to ``dtype``. ``card`` is the text of README.md.
    ``folder`` is written atomically. Raise an ``AdapterError`` if a tensor has no equivalent in the
    checkpoint, or a DiskFullError if the model doesn't fit on the disk.
    """
    whole, left = outline(directory), set(changed)
    new = None if dtype == "auto" else getattr(torch, dtype)
    config_changes: dict[str, Any] = {} if new is None else {"dtype": dtype}
    with replacing(folder) as aside:
        aside.mkdir(parents=True)
        copy_matching(directory, (*DESCRIPTIONS, *_LICENCES), aside, _LEFT_OUT)
        for file in (files := sorted(directory.glob(WEIGHTS))):
            tensors = load_file(file)
            for name, full in full_names(whole, tensors).items():
                if full in left and changed[full].shape == tensors[name].shape:
                    tensors[name] = changed[full].to(new or tensors[name].dtype, copy=True)
                    left.remove(full)
            if file == files[-1] and left == {output := _output_layer(whole)}:
                # It was tied to the token embeddings, and therefore not stored.
                nested = any(name.startswith("language_model.") for name in tensors)
                name = f"language_model.{output}" if nested else output
                tensors[name] = changed[left.pop()]
                config_changes["tie_word_embeddings"] = False
                _update(aside / INDEX, "weight_map", {name: file.name})
            if new is not None:
                tensors = {n: v.to(new) if v.is_floating_point() else v for n, v in tensors.items()}
            save_file(tensors, aside / file.name, metadata={"format": "pt"})
        if left:
            raise AdapterError(
                f"{min(left)} and the checkpoint in {directory} have different shapes or names, so "
                "the adapter can't be merged"
            )
        for part in ("", "text_config"):
            _update(aside / "config.json", part, config_changes)
        (aside / "README.md").write_text(card, encoding="utf-8")


def _update(file: Path, key: str, changes: dict[str, Any]) -> None:
    """Update a JSON object, or with a key an object in it, unless it is missing."""
    if changes and file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        (content.get(key, {}) if key else content).update(changes)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _output_layer(model: Any) -> str:
    """Return the name of the output layer's weights."""
    output = model.get_output_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is output)


def _untie(model: Any) -> bool:
    """Untie the output layer's weights from the token embeddings if either is adapted."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings, output = (getattr(layer, "base_layer", layer) for layer in layers)
    if layers == [embeddings, output] or embeddings.weight is not output.weight:
        return False
    output.weight = torch.nn.Parameter(output.weight.detach().clone(), requires_grad=False)
    return True
