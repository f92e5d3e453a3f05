"""Checkpoints with random weights, written piece by piece: no more than one block is in memory."""

import json
import shutil
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_SPREAD = 0.02  # as models begin their training with
_SPARE = 1.05


def save_random(config: Any, directory: Path, dtype: torch.dtype, seed: int) -> None:
    """Write a causal language model: matrices are drawn, norms are ones.

    Args:
        config: of the model.
        directory: of the checkpoint; it may be there.
        dtype: of the weights.
        seed: of the weights.

    Raises:
        SystemExit: the disk has no room for it.

    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).to(dtype).state_dict()
    directory.mkdir(parents=True, exist_ok=True)
    _refuse_without_room(directory, sum(t.numel() for t in shapes.values()) * dtype.itemsize)
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    files: dict[str, str] = {}
    for number, (_, names) in enumerate(groupby(shapes, _block)):
        tensors = {name: _draw(shapes[name], generator) for name in names}
        file = f"model-{number:05}.safetensors"
        save_file(tensors, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    _write_index(directory, files)


def _block(name: str) -> str:
    """Give what stands before and in a block's number; other tensors stay by themselves."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _draw(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if like.dim() == 1:
        return torch.ones(like.shape, dtype=like.dtype)
    return torch.empty(like.shape, dtype=like.dtype).normal_(0.0, _SPREAD, generator=generator)


def _write_index(directory: Path, files: Mapping[str, str]) -> None:
    index = {"metadata": {}, "weight_map": dict(files)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _refuse_without_room(directory: Path, needed: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < _SPARE * needed:
        raise SystemExit(
            f"the random weights take {needed / 1e9:.1f} GB and {directory} has {free / 1e9:.1f} "
            "GB free; set TMPDIR to a larger disk, or take a smaller --size"
        )
