"""Write a checkpoint whose published weights are quantised again, with bfloat16 weights."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from finetuning.conversion.plan import ConversionError
from finetuning.conversion.weights import weight_files, write_shards
from finetuning.files import copy_matching, replacing
from finetuning.progress import progress_bar

# How many bytes of the new weights there are for each byte of the old ones, by method.
GROWTH = {"mxfp4": 4, "fp8": 2}
# Names of the tensors that a quantised one needs or that only computing with it needs.
_SCALE, _INPUT = ".weight_scale_inv", ".activation_scale"
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README.md")


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings in a ``config.json`` of how weights were quantised; or an empty dict."""
    text = config.get("text_config") or {}
    return config.get("quantization_config") or text.get("quantization_config") or {}


def dequantize(source: Path, target: Path, config: Mapping[str, Any], shard_bytes: int) -> None:
    """Write a checkpoint with the values of the quantised weights, rounded to bfloat16.

    The methods are MXFP4 (blocks of 32 values with a common exponent, as in gpt-oss) and FP8 (with
    a scale for each block of a matrix, as in DeepSeek-V3, or for all of it). Other tensors keep
    their precision. Raise a ConversionError if tensors are missing.
    """
    files = weight_files(source)
    quantization = quantization_of(config)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    if isinstance(text := plain.get("text_config"), dict):
        plain["text_config"] = {n: v for n, v in text.items() if n != "quantization_config"}
    with replacing(target) as aside:
        aside.mkdir()
        copy_matching(source, _COPIED, aside, left_out=["*.index.json"])
        (aside / "config.json").write_text(
            json.dumps(plain | {"dtype": "bfloat16"}, indent=2), encoding="utf-8"
        )
        block = quantization.get("weight_block_size")
        write_shards(_dequantize_tensors(files, block), aside, shard_bytes)


def _dequantize_tensors(
    files: Sequence[Path], block: Sequence[int] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the new tensors by name, with one old tensor in memory at a time."""
    places: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            places |= dict.fromkeys(tensors.keys(), file)

    def read(name: str) -> torch.Tensor:
        if name not in places:
            raise ConversionError(f"the checkpoint lacks {name}; download it again")
        with safe_open(places[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
        return tensor

    with progress_bar(total=len(places), description="converting") as bar:
        for name in sorted(places):
            bar.update()
            if name.endswith("_blocks"):
                plain = name.removesuffix("_blocks")
                yield plain, convert_moe_packed_tensors(read(name), read(f"{plain}_scales"))
            elif not name.endswith(("_scales", _SCALE, _INPUT)):
                value = read(name)
                if value.dtype == torch.float8_e4m3fn:
                    value = _scale_blocks(value, read(name.removesuffix(".weight") + _SCALE), block)
                yield name, value


def _scale_blocks(
    values: torch.Tensor, scale: torch.Tensor, block: Sequence[int] | None
) -> torch.Tensor:
    """Multiply each block of (…, rows, columns) with its scale; the last ones may be smaller."""
    scale = scale.float()
    if block is not None:
        for axis, size in zip((-2, -1), block, strict=True):
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, values.shape[axis])
    return (values.float() * scale).bfloat16()
