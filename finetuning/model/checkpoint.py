"""Information about a checkpoint, read without importing any heavy library."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from finetuning.model.gguf_file import GGUFError, read_header

# File names written by `save_pretrained`; other files contain the same weights again.
WEIGHTS = "model*.safetensors"
# Keys in config.json for the number of blocks.
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def problem_of(name: str, path: Path) -> str | None:
    """Return why a folder or GGUF file can't be used as base model, or None if no problem is found.

    Args:
        name: ``model.name``.
        path: The folder or file.

    """
    if path.is_file():
        return _problem_of_gguf(name, path)
    if not (path / "config.json").is_file():
        return (
            f'model.name = "{name}": no config.json in {path}; it must be a checkpoint directory '
            "in Hugging Face format, or a GGUF file"
        )
    if not isinstance(_config(path), dict):
        return (
            f'model.name = "{name}": {path / "config.json"} is not a JSON object; copy the '
            "checkpoint again"
        )
    files = sorted(path.glob(WEIGHTS))
    if not files:
        return (
            f'model.name = "{name}": no {WEIGHTS} in {path}; other formats can run code when '
            "they are loaded, so convert the checkpoint first, see docs/models.md"
        )
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            return f'model.name = "{name}": {file} is damaged ({error}); copy it again'
    return None


def _problem_of_gguf(name: str, file: Path) -> str | None:
    try:
        read_header(file)
    except (GGUFError, OSError) as error:
        return f'model.name = "{name}": {error}'
    return None


def count_blocks(checkpoint: Path) -> int | None:
    """Return a checkpoint's number of blocks, or None if only ``transformers`` can determine it.

    Args:
        checkpoint: Directory of the checkpoint, or a GGUF file.

    """
    if checkpoint.is_file():
        blocks = re.findall(r"^blk\.(\d+)\.", "\n".join(read_header(checkpoint).weights), re.M)
        return max(map(int, blocks)) + 1 if blocks else None
    config = _config(checkpoint)
    if not isinstance(config, dict):
        return None
    found = next((config[key] for key in _BLOCKS if key in config), None)
    return found if isinstance(found, int) else None


def client_parameters(checkpoint: Path, blocks: int | None = None) -> int:
    """Count the parameters that a client holds, from the headers of the checkpoint's files.

    Args:
        checkpoint: Directory of the checkpoint, or a GGUF file.
        blocks: Number of blocks at the client; None for the whole model.

    """
    counts: Counter[int | None] = Counter()
    for tensor, count in _tensors(checkpoint):
        number = re.search(r"\.(\d+)\.", tensor)
        counts[int(number[1]) if number else None] += count
    ends = counts.pop(None, 0)
    if blocks is None or not counts:
        return ends + counts.total()
    return ends + counts.total() * min(blocks, len(counts)) // len(counts)


def _config(checkpoint: Path) -> Any:
    """Return the content of config.json, or None if it is missing or can't be parsed."""
    try:
        return json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _tensors(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of weights of every tensor."""
    if checkpoint.is_file():
        yield from read_header(checkpoint).weights.items()
    for file in checkpoint.glob(WEIGHTS):
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        for tensor, description in header.items():
            if tensor != "__metadata__":
                yield tensor, math.prod(description["shape"])
