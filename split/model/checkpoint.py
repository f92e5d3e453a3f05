"""The tensors of a checkpoint, read in pieces on demand."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from finetuning.errors import BaseModelError
from finetuning.model.checkpoint import WEIGHTS
from finetuning.model.fingerprint import digest_tensor

# Number of bytes to read at a time.
_PIECE_BYTES = 2 * 2**20


class Checkpoint:
    """The safetensors files of a directory.

    Each piece of a tensor is read through a separate memory map, because the pages that are read
    through a memory map count as memory of the process until the map is closed.

    Files that contain only tensors of other parts of the model may be absent. The attributes map
    each tensor's name to its file, shape and stored data type.
    """

    def __init__(self, directory: Path) -> None:
        self.files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for file in sorted(directory.glob(WEIGHTS)):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    stored = tensors.get_slice(name)
                    self.files[name] = file
                    self.shapes[name] = list(stored.get_shape())
                    self.dtypes[name] = (stored[:0] if self.shapes[name] else stored[...]).dtype

    def pieces(self, name: str) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield pieces of consecutive rows of a tensor, each with its index into the tensor."""
        shape = self.shapes[name]
        indices: list[Any] = [...]
        if shape:
            rows = max(1, _PIECE_BYTES // max(1, prod(shape[1:]) * self.dtypes[name].itemsize))
            indices = [slice(i, min(i + rows, shape[0])) for i in range(0, shape[0], rows)]
        for index in indices:
            with safe_open(self.files[name], framework="pt") as tensors:
                piece = tensors.get_slice(name)[index]
            yield index, piece


class StoredTensor:
    """A tensor that is read when ``transformers`` requests its content with ``tensor[...]``.

    The model computes in ``dtype``. A tensor that is stored in a narrower type is converted to
    ``dtype`` piece by piece, which avoids a second copy. Any other tensor keeps its type, because
    some modules have a wider type than the rest of the model.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._dtype = dtype

    def __getitem__(self, everything: Any) -> torch.Tensor:
        stored = self._checkpoint.dtypes[self._name]
        wider = stored.is_floating_point and stored.itemsize < self._dtype.itemsize
        shape = self._checkpoint.shapes[self._name]
        whole = torch.empty(shape, dtype=self._dtype if wider else stored)
        for rows, piece in self._checkpoint.pieces(self._name):
            whole[rows] = piece
        return whole


def equals_stored(tensor: torch.Tensor, checkpoint: Checkpoint, name: str) -> bool:
    """Return whether ``tensor`` equals the checkpoint's tensor ``name`` in ``tensor.dtype``."""
    return list(tensor.shape) == checkpoint.shapes[name] and all(
        torch.equal(tensor[rows].cpu(), piece.to(tensor.dtype))
        for rows, piece in checkpoint.pieces(name)
    )


def compare_with_checkpoint(
    model: Any, checkpoint: Checkpoint, sources: Mapping[str, str], quantized: bool
) -> dict[str, str]:
    """Read the checkpoint again, and compare the tensors of a part that was loaded from it.

    Quantised tensors are not compared. ``sources`` is the result of
    `split.model.partition.tensors_of_part`. Return the SHA-256 digest of each tensor, by its name
    in the checkpoint; see `finetuning.model.fingerprint`. Raise a BaseModelError if a tensor of the
    model differs from the checkpoint.
    """
    holds = dict(model.state_dict())
    if not quantized:
        # Split what ``transformers`` has concatenated, such as the matrices of a block's experts.
        holds = revert_weight_conversion(model, holds)
    digests = {}
    for key, name in sources.items():
        full = key if key in holds else f"{model.base_model_prefix}.{key}"
        own = holds.pop(full, None)
        comparable = own is not None and (
            not quantized
            or (own.is_floating_point() and list(own.shape) == checkpoint.shapes[name])
        )
        if comparable and not equals_stored(own, checkpoint, name):
            raise BaseModelError(
                f"{full} differs from {name} in {checkpoint.files[name]}: the file has changed "
                f"since it was loaded, or {type(model).__name__} can't be loaded in parts"
            )
        pieces = (piece for _, piece in checkpoint.pieces(name))
        digests[name] = digest_tensor(checkpoint.dtypes[name], checkpoint.shapes[name], pieces)
    if holds and not quantized:
        raise BaseModelError(
            f"{min(holds)} of {type(model).__name__} can't be compared with the checkpoint; split "
            "learning does not support this model"
        )
    return digests
