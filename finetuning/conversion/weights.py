"""Read the tensors of a checkpoint one by one, and write them as safetensors."""

import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetuning.conversion.plan import ConversionError
from finetuning.model.checkpoint import INDEX

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def weight_files(directory: Path) -> list[Path]:
    """Return a checkpoint's weight files, preferably in safetensors format.

    Raise a ConversionError if no weight files exist, or files listed in the index are missing.
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
    """Yield names and tensors; only files in PyTorch's old format (not zip) are loaded as a whole.

    Raise a ConversionError if a file can't be read, or contains objects other than tensors; these
    are not loaded.
    """
    for file in files:
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 - safe_open isn't a mapping
                        yield name, _check_tensor(name, tensors.get_tensor(name), file)
            else:
                # Only PyTorch's newer format (zip) can be memory-mapped.
                content = torch.load(
                    file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
                )
                if not isinstance(content, dict):
                    raise ConversionError(f"{file} is not a mapping of tensors")
                for name in list(content):
                    yield name, _check_tensor(name, content.pop(name), file)
        except (pickle.UnpicklingError, SafetensorError, EOFError, OSError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ConversionError(
                f"{file} can't be read: {reason} (it must contain only tensors; if it is a Git LFS "
                "pointer, replace it with the file itself)"
            ) from error


def _check_tensor(name: str, tensor: object, file: Path) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _DTYPES:
        what = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ConversionError(
            f"{name} in {file} is {what}; only float32, float16 and bfloat16 can be converted, so "
            "use an unquantised checkpoint"
        )
    return tensor


def write_shards(
    tensors: Iterable[tuple[str, torch.Tensor]], directory: Path, limit: int
) -> set[torch.dtype]:
    """Write tensors with the index that transformers expects, and return their data types.

    A file has at most ``limit`` bytes; a larger tensor is written to its own file. Copies of
    only one file's tensors are in memory at a time.
    """
    shard: dict[str, torch.Tensor] = {}
    shards: list[list[str]] = []
    dtypes: set[torch.dtype] = set()
    total = size = 0

    def save() -> None:
        save_file(shard, directory / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and size + tensor.nbytes > limit:
            save()
            size = 0
        shard[name] = tensor.clone(memory_format=torch.contiguous_format)
        dtypes.add(tensor.dtype)
        size += tensor.nbytes
        total += tensor.nbytes
    save()
    if len(shards) == 1:
        (directory / "0.safetensors").rename(directory / "model.safetensors")
        return dtypes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        final = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"{number}.safetensors").rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return dtypes
