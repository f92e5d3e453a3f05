"""What can be known of a checkpoint's folder before any heavy library is imported."""

import json
import math
import re
from collections import Counter
from pathlib import Path

# The names that `save_pretrained` gives; other files beside them hold the same weights again.
WEIGHTS = "model*.safetensors"


def problem_of(name: str, path: Path) -> str | None:
    """Return why a folder can't be the base model, or None if it can.

    Args:
        name: ``model.name``.
        path: The folder.

    """
    if not (path / "config.json").is_file():
        return (
            f'model.name = "{name}": no config.json in {path}; it must be a checkpoint directory '
            "in Hugging Face format"
        )
    if not any(path.glob(WEIGHTS)):
        return (
            f'model.name = "{name}": no {WEIGHTS} in {path}; other formats can run code when '
            "they are loaded, so convert the checkpoint first, see docs/models.md"
        )
    return None


def client_parameters(directory: Path, blocks: int | None = None) -> int:
    """Count the parameters that a client holds, from the headers of the safetensors files.

    Args:
        directory: Directory of the checkpoint.
        blocks: Number of blocks at the client; None for the whole model.

    """
    counts: Counter[int | None] = Counter()
    for file in directory.glob(WEIGHTS):
        with file.open("rb") as content:
            header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
        for tensor, description in header.items():
            if tensor != "__metadata__":
                number = re.search(r"\.(\d+)\.", tensor)
                key = int(number[1]) if number else None
                counts[key] += math.prod(description["shape"])
    ends = counts.pop(None, 0)
    if blocks is None or not counts:
        return ends + counts.total()
    return ends + counts.total() * min(blocks, len(counts)) // len(counts)
