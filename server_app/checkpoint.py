"""Checkpoints for resuming a run: one file per round."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from federation.run_config import ConfigError
from federation.run_folder import CHECKPOINTS, checkpoint_files
from finetuning.adapters.adapter import State
from finetuning.files import replacing
from finetuning.model.fingerprint import differences
from strategies.journal import Progress

_KEPT = 2


@dataclass(frozen=True)
class RunCheckpoint:
    """The state of a run after a round."""

    progress: Progress
    state: State  # the global adapter
    sizes: dict[str, int]  # number of training rows of each client that has taken part
    rounds: dict[str, int]  # for each client, the last round with a personalised adapter
    metrics_bytes: int  # length of ``metrics.jsonl`` when the checkpoint was saved


def save_checkpoint(directory: Path, checkpoint: RunCheckpoint, keep_all: bool = False) -> None:
    """Write a checkpoint atomically; unless ``keep_all``, delete all but the last two."""
    progress = checkpoint.progress
    groups = {
        "adapter": checkpoint.state,
        "importance": progress.importance or {},
        "optimizers": progress.optimizers or {},
        "update": progress.update or {},
    }
    tensors = {f"{group}.{k}": value for group in groups for k, value in groups[group].items()}
    others = {"progress", "state", *groups}
    fields = {k: v for k, v in (vars(progress) | vars(checkpoint)).items() if k not in others}
    with replacing(_path(directory, progress.finished_rounds)) as aside:
        save_file(tensors, aside, metadata={"checkpoint": json.dumps(fields)})
    for old in [] if keep_all else checkpoint_files(directory)[:-_KEPT]:
        old.unlink()


def discard_checkpoint(directory: Path, round_number: int) -> None:
    """Remove a round's checkpoint if an earlier one exists."""
    file = _path(directory, round_number)
    if file in checkpoint_files(directory)[1:]:
        file.unlink()


def load_run_checkpoint(directory: Path, round_number: int | None = None) -> RunCheckpoint:
    """Read the checkpoint after a round, by default the newest, of a run that can be resumed.

    Raise ``ConfigError`` if the checkpoint can't be read.
    """
    newest = checkpoint_files(directory)[-1]
    file = newest if round_number is None else _path(directory, round_number)
    try:
        with safe_open(file, framework="pt") as content:
            fields = json.loads(content.metadata()["checkpoint"])
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        own = {key: fields.pop(key) for key in ("sizes", "rounds", "metrics_bytes")}
        progress = Progress(
            **fields,
            importance=_with_prefix(tensors, "importance.") or None,
            optimizers=_with_prefix(tensors, "optimizers.") or None,
            update=_with_prefix(tensors, "update.") or None,
        )
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    return RunCheckpoint(progress, _with_prefix(tensors, "adapter."), **own)


def check_base_model(directory: Path, fingerprint: Mapping[str, str]) -> None:
    """Check that the run to resume began with the same base model.

    Raise ``ConfigError`` if the models differ, or ``base-model.json`` can't be read.
    """
    file = directory / "base-model.json"
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8"))["digests"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f'resume = "{directory}": base-model.json can\'t be read: {error}'
        ) from error
    # Ignore added tensors: files of other parts of a split model may have been added to the folder.
    changed = [name for name in differences(before, fingerprint) if name in before]
    if changed:
        raise ConfigError(
            f'resume = "{directory}": the base model is not the one that the run began with: '
            f"{', '.join(changed[:3])}{' …' if len(changed) > 3 else ''} differ"
        )


def _with_prefix(tensors: State, prefix: str) -> State:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _path(directory: Path, round_number: int) -> Path:
    return directory / CHECKPOINTS / f"round-{round_number:04d}.safetensors"
