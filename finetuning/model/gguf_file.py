"""Use a GGUF file as a base model: convert it once to a safetensors checkpoint in the cache.

All weights are dequantised to float32. The checkpoint is then used like any other checkpoint:
fingerprints, the parts of a split model and bitsandbytes read its tensors by name.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from finetuning.errors import BaseModelError
from finetuning.files import cache_directory, cached, stamps

ORIGIN = "gguf.json"
_MAGIC = b"GGUF"
# Version of the conversion and its checks; part of a checkpoint's name in the cache.
_VERSION = 3
# Prefixes of the names of tensors that llama.cpp uses to scale rotary positions.
_SCALES = ("rope_freqs", "rope_factors_")
# Architectures whose 27B models don't scale queries by the head size.
_SCALED_QUERIES = {"gemma2", "gemma3"}


@dataclass(frozen=True)
class Header:
    """The header of a GGUF file."""

    architecture: str  # GGUF's name of the architecture
    weights: dict[str, int]  # number of weights of each tensor
    # Types of all tensors with more than one dimension, in descending order of their numbers of
    # weights, such as ``Q4_1, Q8_0``.
    quantization: str
    scales_positions: bool  # whether rotary positions are scaled, as in Llama 3.1
    window: int | None  # size of the sliding attention window in tokens, if given


def convert_gguf(file: Path) -> Path:
    """Return the directory of a checkpoint with a GGUF file's weights; write it on first use.

    The checkpoint is cached under the digest of the file's content. Writing requires memory for the
    whole model in float32. Raise a BaseModelError if the file can't be used, or the checkpoint
    can't be written.
    """
    try:
        digest = _digest(file)
        target = cache_directory() / f"gguf-{digest[:16]}-{_VERSION}"
        return cached(target, partial(_convert, file, digest))
    except OSError as error:
        raise BaseModelError(
            f"{file} can't be read, or its converted weights can't be stored in "
            f"{cache_directory()}: {error}; set CHAMBERS_CACHE to use a different folder"
        ) from error


def origin_of(directory: Path) -> dict[str, str] | None:
    """Describe the GGUF file that a checkpoint was converted from, or return None if there is none.

    The keys are ``file`` (its name without the folder), ``sha256`` and ``quantization``.
    """
    file = directory / ORIGIN
    origin: dict[str, str] | None = json.loads(file.read_text()) if file.is_file() else None
    return origin


def read_header(file: Path) -> Header:
    """Read a GGUF file's header, and check that the file contains all of its tensors.

    Raise ``BaseModelError`` if the file isn't a GGUF file, or is damaged. Raise ``OSError`` if the
    file can't be read.
    """
    with file.open("rb") as content:
        if content.read(len(_MAGIC)) != _MAGIC:
            raise BaseModelError(
                f"{file} is not a GGUF file; a base model is a GGUF file, a checkpoint directory "
                "in Hugging Face format, or a Hugging Face id"
            )
    with _explaining(file, "is damaged or incomplete", "download it again"):
        reader = _reader(file)
        field = reader.get_field("general.architecture")
        if field is None:
            raise ValueError("it names no architecture")
        weights = {tensor.name: math.prod(map(int, tensor.shape)) for tensor in reader.tensors}
        by_type: Counter[str] = Counter()
        for tensor in reader.tensors:
            if len(tensor.shape) > 1:
                by_type[tensor.tensor_type.name] += weights[tensor.name]
        architecture = str(field.contents())
        scaling = reader.get_field(f"{architecture}.rope.scaling.type")
        window = reader.get_field(f"{architecture}.attention.sliding_window")
        return Header(
            architecture=architecture,
            weights=weights,
            quantization=", ".join(kind for kind, _ in by_type.most_common()),
            scales_positions=any(name.startswith(_SCALES) for name in weights)
            or (scaling is not None and scaling.contents() not in {"", "none"}),
            window=int(window.contents()) if window is not None else None,
        )


def _reader(file: Path) -> Any:
    """Return the library's reader, extended to raise an error if the header is truncated.

    The original reader returns empty values beyond the end of the file. For an array with a claimed
    length of 2⁶⁰ it would run indefinitely and exhaust the memory.
    """
    import numpy as np
    from gguf import GGUFReader

    class Reader(GGUFReader):  # type: ignore[misc]
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            # The data is sliced for each token; a memmap takes four times as long as an array.
            self.data: Any = np.asarray(self.data)
            values = super()._get(offset, dtype, count, *order, **options)
            if len(values) < count:
                raise ValueError("it ends within its header")
            return values

    return Reader(file)


def _digest(file: Path) -> str:
    """Return the SHA-256 digest of a file's content; cached until the file changes."""
    key = hashlib.sha256(json.dumps(stamps(file.resolve())).encode()).hexdigest()

    def write(aside: Path) -> None:
        with file.open("rb") as content:
            aside.write_text(hashlib.file_digest(content, "sha256").hexdigest())

    return cached(cache_directory() / "gguf-digests" / key, write).read_text()


def _convert(file: Path, digest: str, directory: Path) -> None:
    """Save a GGUF file's weights, configuration, tokenizer and origin in Hugging Face format."""
    import torch
    from transformers import AutoTokenizer

    header = read_header(file)
    model, missing = _read_model(file, header)
    config = model.config
    if missing:
        raise BaseModelError(
            f"{file} lacks {len(missing)} of the model's tensors, including "
            f"{', '.join(missing[:3])}; if it is one of several files, join "
            "them with llama-gguf-split --merge"
        )
    if header.scales_positions and not _scales_positions(config):
        raise BaseModelError(
            f"{file} scales positions (RoPE) in a way that transformers doesn't read from GGUF; "
            f"{_INSTEAD}"
        )
    if header.architecture in _SCALED_QUERIES and config.head_dim != config.query_pre_attn_scalar:
        raise BaseModelError(
            f"{file} contains a model that scales queries by a value that GGUF files don't "
            f"contain; {_INSTEAD}"
        )
    settings = config.to_dict()
    settings.pop("quantization_config", None)
    if header.architecture == "phi3":  # transformers doesn't read its sliding window
        settings["sliding_window"] = header.window
    # The loaded model's configuration says that the model is quantised, so save a plain copy.
    with torch.device("meta"):
        plain = type(model)(type(config).from_dict(settings))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(directory)
    with _explaining(file, "has no tokenizer that transformers can read", _INSTEAD):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(directory)
    origin = {"file": file.name, "sha256": digest, "quantization": header.quantization}
    (directory / ORIGIN).write_text(json.dumps(origin, indent=1) + "\n")


_INSTEAD = "use the checkpoint in safetensors format that the GGUF file was made from"


def _read_model(file: Path, header: Header) -> tuple[Any, list[str]]:
    """Read a GGUF file with ``transformers``; return the model and the names of missing tensors."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    problem = f"has the architecture {header.architecture}, which transformers can't read from GGUF"
    with _explaining(file, problem, _INSTEAD):
        model, report = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            trust_remote_code=False,
            output_loading_info=True,
        )
    return model, sorted(report["missing_keys"])


def _scales_positions(config: Any) -> bool:
    """Return whether positions are scaled in any kind of block."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings, *(each for each in settings.values() if isinstance(each, dict))]
    return any(each.get("rope_type", "default") != "default" for each in kinds)


@contextmanager
def _explaining(file: Path, problem: str, advice: str) -> Iterator[None]:
    """Convert exceptions that libraries raise for unsuitable files to a BaseModelError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError, RuntimeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BaseModelError(f"{file} {problem} ({reason}); {advice}") from error
