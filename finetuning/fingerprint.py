"""Which base model this is: a digest per tensor, so that two institutions can compare theirs."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock
from safetensors import safe_open

from finetuning.base_model import WEIGHTS
from finetuning.files import cache_directory, replacing

# Written by the library that saved the checkpoint, or by the place it was saved to.
_INCIDENTAL = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}


def fingerprint(directory: Path) -> dict[str, str]:
    """Give the SHA-256 digests of every tensor, the configuration, tokenizer and chat template.

    Equal checkpoints have equal fingerprints however they are sharded. Digests are cached by the
    files' paths, sizes and times, since reading gigabytes takes a while.

    Returns:
        Tensor names, ``config.json``, ``tokenizer.json`` and ``chat template`` to hexadecimal
        digests.

    """
    files = sorted(directory.glob(WEIGHTS))
    stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = hashlib.sha256(json.dumps(stamps).encode()).hexdigest()
    cached = cache_directory() / "fingerprints" / f"{key}.json"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(cached.with_suffix(".lock")):
        if not cached.is_file():
            tensors = {name: value for file in files for name, value in _tensor_digests(file)}
            with replacing(cached) as aside:
                aside.write_text(json.dumps(tensors))
    digests: dict[str, str] = json.loads(cached.read_text())
    digests["config.json"] = _config_digest(directory / "config.json")
    tokenizer = directory / "tokenizer.json"
    if tokenizer.is_file():
        digests["tokenizer.json"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    digests["chat template"] = hashlib.sha256(_chat_template(directory).encode()).hexdigest()
    return digests


def digest(fingerprint: Mapping[str, str]) -> str:
    """Condense a fingerprint into one SHA-256 digest."""
    return hashlib.sha256(json.dumps(dict(fingerprint), sort_keys=True).encode()).hexdigest()


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Name what differs or is missing on either side, sorted."""
    return sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )


def _tensor_digests(file: Path) -> list[tuple[str, str]]:
    """Digest each tensor of a file with its dtype and shape, one in memory at a time."""
    import torch

    result = []
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - safe_open isn't a mapping
            tensor = tensors.get_tensor(name)
            state = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            result.append((name, state.hexdigest()))
    return result


def _chat_template(directory: Path) -> str:
    """Give the template from either of the places where checkpoints keep it; empty without one."""
    file, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return str(json.loads(config.read_text()).get("chat_template", "")) if config.is_file() else ""


def _config_digest(path: Path) -> str:
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in _INCIDENTAL}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
