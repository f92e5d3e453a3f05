"""A checkpoint's tensors, each read only when it is needed and then in pieces."""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.core_model_loading import revert_weight_conversion

from finetuning.model.base_model import BaseModelError
from finetuning.model.checkpoint import WEIGHTS
from finetuning.model.fingerprint import tensor_digest

# What is read at once.
_PIECE_BYTES = 2 * 2**20


class Checkpoint:
    """The safetensors files of a directory.

    Each piece of a tensor is read through a mapping of its own: what was read through one counts as
    the process's memory for as long as the mapping is there.

    Args:
        directory: of the checkpoint; files of other parties' tensors may be absent.

    Attributes:
        files: the file that has each tensor, by the tensor's name.

    """

    def __init__(self, directory: Path) -> None:
        self.files: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        for file in sorted(directory.glob(WEIGHTS)):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    stored = tensors.get_slice(name)
                    self.files[name] = file
                    self._shapes[name] = list(stored.get_shape())
                    empty = stored[:0] if self._shapes[name] else stored[...]
                    self._dtypes[name] = empty.dtype

    def shape(self, name: str) -> list[int]:
        """Give a tensor's shape."""
        return self._shapes[name]

    def dtype(self, name: str) -> torch.dtype:
        """Give the precision that a tensor is stored in."""
        return self._dtypes[name]

    def pieces(self, name: str) -> Iterator[tuple[Any, torch.Tensor]]:
        """Read a tensor in pieces of rows; each with its place, and gone when it isn't used."""
        shape = self.shape(name)
        if not shape:
            yield ..., self._read(name, ...)
            return
        rows = max(1, _PIECE_BYTES // max(1, prod(shape[1:]) * self.dtype(name).itemsize))
        for start in range(0, shape[0], rows):
            place = slice(start, min(start + rows, shape[0]))
            yield place, self._read(name, place)

    def _read(self, name: str, place: Any) -> torch.Tensor:
        with safe_open(self.files[name], framework="pt") as tensors:
            return tensors.get_slice(name)[place]  # type: ignore[no-any-return]


class StoredTensor:
    """A tensor that is read when ``transformers`` takes its content, ``tensor[...]``.

    Args:
        checkpoint: the opened files.
        name: of the tensor.
        dtype: what the model computes in. Narrower tensors are widened piece by piece, so that no
            second copy of them exists meanwhile; others are given as they are stored, since some
            modules stay wider than the rest of their model.

    """

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._name = name
        self._dtype = dtype

    def __getitem__(self, everything: Any) -> torch.Tensor:
        stored, shape = self._checkpoint.dtype(self._name), self._checkpoint.shape(self._name)
        wider = stored.is_floating_point and stored.itemsize < self._dtype.itemsize
        whole = torch.empty(shape, dtype=self._dtype if wider else stored)
        for rows, piece in self._checkpoint.pieces(self._name):
            whole[rows] = piece
        return whole


def same(tensor: torch.Tensor, checkpoint: Checkpoint, name: str) -> bool:
    """Compare a tensor with a checkpoint's, rounded to the same precision."""
    return list(tensor.shape) == checkpoint.shape(name) and all(
        torch.equal(tensor[rows].cpu(), piece.to(tensor.dtype))
        for rows, piece in checkpoint.pieces(name)
    )


def compared(
    model: Any, checkpoint: Checkpoint, sources: Mapping[str, str], quantized: bool
) -> dict[str, str]:
    """Read a model's tensors once more and compare them with what it holds.

    Quantised ones can't be compared.

    Args:
        model: a part that ``transformers`` has just loaded.
        checkpoint: what it was loaded from.
        sources: see ``split.model.cut.tensors_of_part``.
        quantized: whether weights were quantised.

    Returns:
        The SHA-256 digest of each tensor, by its name in the checkpoint; see
        ``finetuning.fingerprint``.

    Raises:
        BaseModelError: a tensor of the model is not the checkpoint's.

    """
    holds = dict(model.state_dict())
    if not quantized:
        # Undoes what ``transformers`` joins, such as the experts' matrices of a block.
        holds = revert_weight_conversion(model, holds)
    digests = {}
    for key, name in sources.items():
        full = key if key in holds else f"{model.base_model_prefix}.{key}"
        own = holds.pop(full, None)
        comparable = own is not None and (
            not quantized or (own.is_floating_point() and list(own.shape) == checkpoint.shape(name))
        )
        if comparable and not same(own, checkpoint, name):
            raise BaseModelError(
                f"{full} was not loaded as it is in {checkpoint.files[name]}, where it is "
                f"{name}: the file has changed meanwhile, or {type(model).__name__} can't be "
                "loaded in parts"
            )
        pieces = (piece for _, piece in checkpoint.pieces(name))
        digests[name] = tensor_digest(checkpoint.dtype(name), checkpoint.shape(name), pieces)
    if holds and not quantized:
        raise BaseModelError(
            f"{min(holds)} of {type(model).__name__} can't be compared with the checkpoint, so "
            "split learning doesn't use it"
        )
    return digests
