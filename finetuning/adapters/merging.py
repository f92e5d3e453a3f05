"""Merge a LoRA adapter into its base model's weights."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from finetuning.adapters.adapter import attach_adapter, load_adapter
from finetuning.adapters.saved import AdapterError, SavedAdapter
from finetuning.files import replacing
from finetuning.model.base_model import BaseModelError, fetch, load_checkpoint
from finetuning.model.names import is_id, resolve
from finetuning.model.one_at_a_time import one_at_a_time

_LICENCES = ("LICENSE*", "NOTICE*", "MODEL_LICENSE*")


def fetch_licence(name: str) -> None:
    """Download the licence and card of a model on the Hugging Face Hub, if it can be reached."""
    if is_id(resolve(name)):
        with suppress(BaseModelError):
            fetch(resolve(name), ("README.md", *_LICENCES))


@one_at_a_time()
def merge(adapter: SavedAdapter, directory: Path, dtype: str) -> Any:
    """Load a base model, and add (alpha / rank) · B · A to each weight that the adapter adapts.

    The product is computed in float32 and rounded to ``dtype``; ``"auto"`` is the data type of the
    checkpoint in ``directory``. Return a ``transformers`` model without adapters, in CPU memory.

    Raise ``AdapterError`` if the adapter is for a different base model, or contains NaN. Raise
    ``BaseModelError`` if the checkpoint can't be loaded.
    """
    base = load_checkpoint(directory, dtype=dtype)
    try:
        model = attach_adapter(base, adapter.settings, None)
        load_adapter(model, adapter.state)
    except ValueError as error:
        raise AdapterError(
            f"the adapter in {adapter.directory} is for a different base model: {error}"
        ) from error
    _untie(model)
    try:
        return model.merge_and_unload(safe_merge=True)
    except ValueError as error:  # the adapter contains NaN
        raise AdapterError(
            f"the adapter in {adapter.directory} can't be merged: {error}"
        ) from error


def save_merged(model: Any, directory: Path, folder: Path, card: str) -> None:
    """Write a merged model, and the tokenizer and licence of its base model's checkpoint.

    ``directory`` is the base model's checkpoint, and ``card`` the text of README.md. ``folder`` is
    written atomically. Raise a DiskFullError if the model doesn't fit on the disk.
    """
    from transformers import AutoTokenizer

    # Save the tokenizer unchanged: ``load_tokenizer`` may add a padding token.
    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    with replacing(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        for pattern in _LICENCES:
            for file in directory.glob(pattern):
                shutil.copy(file, aside)
        (aside / "README.md").write_text(card, encoding="utf-8")


def _untie(model: Any) -> None:
    """Untie the output layer's weights from the token embeddings if either is adapted."""
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    embeddings, output = (getattr(layer, "base_layer", layer) for layer in layers)
    if layers != [embeddings, output] and embeddings.weight is output.weight:
        output.weight = torch.nn.Parameter(output.weight.detach().clone(), requires_grad=False)
        model.config.tie_word_embeddings = False
