"""Identify a base model by a digest per tensor, so that institutions can compare copies of it."""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from finetuning.files import cache_directory, cached, stamps
from finetuning.model.checkpoint import WEIGHTS

# Entries of a fingerprint other than tensors; all parties of a split model have these entries.
PARTIES_SHARE = ("config.json", "tokenizer.json", "chat template")
# Keys of config.json that depend on how, or from which path, the checkpoint was saved.
_INCIDENTAL = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}


def fingerprint(directory: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """Return the SHA-256 digests of all tensors, the configuration, tokenizer and chat template.

    Equal checkpoints have equal fingerprints, regardless of sharding. Tensors that are not among
    ``names`` are neither read nor included; None includes all. Digests are hexadecimal. Tensors'
    digests are cached by the files' paths, sizes and modification times.
    """
    files = sorted(directory.glob(WEIGHTS))
    wanted = None if names is None else sorted(names)
    file_stamps = [stamp for file in files for stamp in stamps(file.resolve())]
    key = hashlib.sha256(json.dumps([file_stamps, wanted]).encode()).hexdigest()
    kept = cached(
        cache_directory() / "fingerprints" / f"{key}.json",
        lambda aside: aside.write_text(json.dumps(_tensor_digests(files, wanted))),
    )
    digests: dict[str, str] = json.loads(kept.read_text())
    digests["config.json"] = digest_config(directory / "config.json")
    tokenizer = directory / "tokenizer.json"
    if tokenizer.is_file():
        digests["tokenizer.json"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    digests["chat template"] = hashlib.sha256(_chat_template(directory).encode()).hexdigest()
    return digests


def combine_digests(fingerprint: Mapping[str, str]) -> str:
    """Return one SHA-256 digest of a fingerprint."""
    return hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()


def differences(ours: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the sorted names of entries that differ or are missing in one of the fingerprints."""
    return sorted(
        name for name in ours.keys() | others.keys() if ours.get(name) != others.get(name)
    )


def _tensor_digests(files: Sequence[Path], wanted: Collection[str] | None) -> dict[str, str]:
    """Digest the wanted tensors of the files, with one tensor in memory at a time."""
    digests = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open isn't a mapping
                if wanted is None or name in wanted:
                    tensor = tensors.get_tensor(name)
                    digests[name] = digest_tensor(tensor.dtype, tensor.shape, [tensor])
    return digests


def digest_tensor(dtype: torch.dtype, shape: Sequence[int], pieces: Iterable[torch.Tensor]) -> str:
    """Digest a tensor's dtype, shape and values, which are given in consecutive pieces."""
    state = hashlib.sha256(f"{dtype} {tuple(shape)}".encode())
    for piece in pieces:
        state.update(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def _chat_template(directory: Path) -> str:
    """Return the template from either of its possible files, or an empty string."""
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return str(json.loads(config.read_text()).get("chat_template", "")) if config.is_file() else ""


def digest_config(path: Path) -> str:
    """Digest a ``config.json``, excluding keys that depend on its path or the saving library."""
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in _INCIDENTAL}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
