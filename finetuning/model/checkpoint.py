"""Information about a checkpoint, read without importing any heavy library."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from finetuning.errors import BaseModelError
from finetuning.model.gguf_file import read_header

# Names of the files that `save_pretrained` writes; other files can contain the same weights again.
WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
# Keys in config.json for the number of blocks and for the hidden size.
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


def check_checkpoint(path: Path) -> None:
    """Raise a BaseModelError if a path is neither a checkpoint that can be used nor a GGUF file."""
    if path.is_file():
        try:
            read_header(path)
        except OSError as error:
            raise BaseModelError(str(error)) from error
        return
    if not (path / "config.json").is_file():
        raise BaseModelError(
            f"no config.json in {path}; it must be a checkpoint directory in Hugging Face format, "
            "or a GGUF file"
        )
    if _config(path) is None:
        raise BaseModelError(
            f"{path / 'config.json'} is not a JSON object; copy the checkpoint again"
        )
    if (path / "adapter_config.json").is_file():
        raise BaseModelError(
            f"{path} also contains an adapter, which would change the base model; move its "
            "adapter_config.json and adapter_model.safetensors to a folder of their own"
        )
    refuse_quantized(path)
    read_index(path)
    files = sorted(path.glob(WEIGHTS))
    if not files:
        raise BaseModelError(
            f"no {WEIGHTS} in {path}; other formats can run code when they are loaded, so convert "
            "the checkpoint first (docs/models.md)"
        )
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise BaseModelError(f"{file} is damaged ({error}); copy it again") from error


def refuse_quantized(checkpoint: Path) -> None:
    """Raise a BaseModelError if a directory's weights were saved quantised."""
    quantization = (_config(checkpoint) or {}).get("quantization_config")
    if isinstance(quantization, dict):
        remedy = "use the original checkpoint instead, with model.quantization"
        if quantization.get("quant_method") in {"mxfp4", "fp8"}:
            remedy = f"write its weights in bfloat16 with: chambers convert {checkpoint} FOLDER"
        raise BaseModelError(f"the checkpoint in {checkpoint} is already quantised; {remedy}")


def refuse_missing_shards(checkpoint: Path) -> None:
    """Raise a BaseModelError if a directory lacks files of its index.

    Of a split model's checkpoint, a party needs only some files.
    """
    files = sorted(set(read_index(checkpoint).values()))
    if missing := [name for name in files if not (checkpoint / name).exists()]:
        raise BaseModelError(f"{checkpoint} lacks {', '.join(missing)}; copy the checkpoint again")


def read_index(checkpoint: Path) -> dict[str, str]:
    """Return the file of each tensor from a directory's index; without an index, the dict is empty.

    Raise a BaseModelError if the index can't be read.
    """
    index = checkpoint / INDEX
    if not index.is_file():
        return {}
    try:
        return dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        message = f"{index} is no index of tensors; copy the checkpoint again"
        raise BaseModelError(message) from error


def vocabulary_size(checkpoint: Path) -> int | None:
    """Return the number of tokens with an embedding in a directory's model; None if unknown."""
    size = (_config(checkpoint) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def count_blocks(checkpoint: Path) -> int | None:
    """Return the number of blocks of the model in a checkpoint's directory or a GGUF file.

    The result is None if only ``transformers`` can determine it.
    """
    if checkpoint.is_file():
        blocks = re.findall(r"^blk\.(\d+)\.", "\n".join(read_header(checkpoint).weights), re.M)
        return max(map(int, blocks)) + 1 if blocks else None
    config = _config(checkpoint) or {}
    number = next((config[key] for key in _BLOCKS if key in config), None)
    return number if isinstance(number, int) else None


def hidden_size(checkpoint: Path) -> int:
    """Return the hidden size of the model in a directory or a GGUF file; 0 if it is unknown."""
    if checkpoint.is_file():
        return dict(_tensors(checkpoint)).get("output_norm.weight", 0)
    config = _config(checkpoint) or {}
    return next((int(config[key]) for key in _HIDDEN if key in config), 0)


def client_parameters(checkpoint: Path, blocks: int | None = None) -> int:
    """Count the parameters of a client with ``blocks`` blocks, or with all blocks if None.

    The checkpoint is a directory or a GGUF file; only the headers of its files are read.
    """
    counts: Counter[int | None] = Counter()
    tensors = dict(_tensors(checkpoint))
    # If the model also accepts images or sound, clients have only its text model.
    has_other = any("language_model" in tensor for tensor in tensors)
    for tensor, count in tensors.items():
        if has_other and not re.search("language_model|^lm_head", tensor):
            continue
        number = re.search(r"\.(\d+)\.", tensor)
        counts[int(number[1]) if number else None] += count
    ends = counts.pop(None, 0)
    if blocks is None or not counts:
        return ends + counts.total()
    return ends + counts.total() * min(blocks, len(counts)) // len(counts)


def _config(checkpoint: Path) -> dict[str, Any] | None:
    """Return the content of config.json, or None if it is missing or not a JSON object.

    If the model also accepts images or sound, the values of its text model take precedence.
    """
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _tensors(checkpoint: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and number of weights of every tensor of a checkpoint."""
    if checkpoint.is_file():
        yield from read_header(checkpoint).weights.items()
    for file in checkpoint.glob(WEIGHTS):
        with safe_open(file, framework="numpy") as tensors:
            for tensor in tensors.keys():  # noqa: SIM118 - safe_open isn't a mapping
                yield tensor, math.prod(tensors.get_slice(tensor).get_shape())
