"""Read the tensors of a checkpoint one by one, and write them as safetensors."""

import json
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetuning.conversion.plan import ConversionError

_INDEX = "model.safetensors.index.json"
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def weight_files(directory: Path) -> list[Path]:
    """Return a checkpoint's weight files, preferably in safetensors format.

    Raises:
        ConversionError: There are none, or files listed in the index are missing.

    """
    for pattern in ("model*.safetensors", "pytorch_model*.bin"):
        files = sorted(directory.glob(pattern))
        if not files:
            continue
        for index in directory.glob(pattern + ".index.json"):
            named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            missing = sorted(named - {file.name for file in files})
            if missing:
                raise ConversionError(f"{directory} lacks {', '.join(missing)}, see {index.name}")
        return files
    raise ConversionError(f"{directory} has neither model*.safetensors nor pytorch_model*.bin")


def read_tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors; at most one file is in memory.

    Raises:
        ConversionError: A file can't be read, or contains objects other than tensors; these are
            not loaded.

    """
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - safe_open isn't a mapping
                        yield name, _checked(name, tensors.get_tensor(name), file)
            else:
                # Only PyTorch's newer format (zip) can be memory-mapped.
                content = torch.load(
                    file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
                )
                if not isinstance(content, dict):
                    raise ConversionError(f"{file} is not a mapping of tensors")
                while content:
                    name = next(iter(content))
                    yield name, _checked(name, content.pop(name), file)
        except (pickle.UnpicklingError, SafetensorError, EOFError, OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConversionError(
                f"{file} can't be read: {reason} (it must contain tensors alone, and not be the "
                "pointer that Git LFS leaves in place of a file)"
            ) from error


def _checked(name: str, tensor: object, file: Path) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
        what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConversionError(
            f"{name} in {file} is {what}; only float32, float16 and bfloat16 can be converted, so "
            "use the checkpoint that is not quantised"
        )
    return tensor


class ShardWriter:
    """Write tensors to files of limited size, with the index that transformers expects.

    Args:
        directory: Existing folder.
        limit: Maximum number of bytes in a file; a larger tensor gets a file of its own.

    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit
        self._waiting: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._bytes = 0
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy and add a tensor."""
        size = tensor.nbytes
        if self._waiting and self._bytes + size > self._limit:
            self._write()
        self._waiting[name] = tensor.clone(memory_format=torch.contiguous_format)
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        """Write the remaining tensors and the index."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._path(0).rename(self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._path(number).rename(self._directory / final)
            weight_map |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self._total}, "weight_map": weight_map}
        (self._directory / _INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _path(self, number: int) -> Path:
        return self._directory / f"{number}.safetensors"

    def _write(self) -> None:
        save_file(self._waiting, self._path(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._waiting))
        self._waiting, self._bytes = {}, 0
