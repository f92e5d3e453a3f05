"""What a run needs to go on after its last finished round: one file per round."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from finetuning.adapters.adapter import State
from finetuning.files import replacing
from finetuning.model.fingerprint import differences
from strategies.run_config import ConfigError, RunConfig

_KEPT = 2
# May differ between a run and its resumption: none of them changes what is computed. (Other devices
# round otherwise, and have other dropout; but a machine can be another one.)
_MAY_CHANGE = {
    "min-nodes",
    "node-timeout",
    "round-timeout",
    "output-dir",
    "state-path",
    "resume",
    "data.path",
    "evaluate.every",
    "evaluate.batch-size",
    "evaluate.generate",
    "evaluate.generate-examples",
    "evaluate.max-new-tokens",
    "split.window",
    "split.activation-budget",
    "split.body-devices",
    "split.listen",
    "split.advertise",
    "split.key-exchange",
    "split.rotate-keys-every",
    "split.share-cap",
    "split.gather-timeout",
    "split.join-timeout",
    "split.resume-timeout",
    "split.frame-timeout",
}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        lineage: names the run across its resumptions.
        finished_rounds: rounds whose averaged adapter this is.
        evaluated: whether that adapter has been evaluated.
        sizes: training examples of every client that has taken part.
        metrics_bytes: length of ``metrics.jsonl`` when this was written.
        state: the global adapter.
        importance: J at it, if it has been computed.
        optimizers: of what the server trains itself, if it does.

    """

    lineage: str
    finished_rounds: int
    evaluated: bool
    sizes: dict[str, int]
    metrics_bytes: int
    state: State
    importance: State | None
    optimizers: State | None


def save_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write ``checkpoints/round-0002.safetensors``, whole or not at all; the last two are kept."""
    tensors = {f"adapter.{name}": value for name, value in checkpoint.state.items()}
    for name, value in (checkpoint.importance or {}).items():
        tensors[f"importance.{name}"] = value
    for name, value in (checkpoint.optimizers or {}).items():
        tensors[f"optimizers.{name}"] = value
    fields = {
        field.name: getattr(checkpoint, field.name)
        for field in dataclasses.fields(checkpoint)
        if field.name not in {"state", "importance", "optimizers"}
    }
    with replacing(_path(directory, checkpoint.finished_rounds)) as aside:
        save_file(tensors, aside, metadata={"checkpoint": json.dumps(fields)})
    for old in _all(directory)[:-_KEPT]:
        old.unlink()


def load_checkpoint(directory: Path, config: RunConfig) -> Checkpoint:
    """Read the newest checkpoint of a run's folder.

    Raises:
        ConfigError: there is none, or ``config`` would go on with something else than that run.

    """
    if not directory.is_dir():
        raise ConfigError(f'resume = "{directory}" is not a folder')
    files = _all(directory)
    if not files:
        raise ConfigError(f'resume = "{directory}" has no checkpoint; start the run anew')
    before = json.loads((directory / "config.json").read_text())
    may_change = set(_MAY_CHANGE)
    if config.train.schedule == "constant" and config.train.warmup_ratio == 0:
        may_change.add("rounds")  # any other schedule spans a number of rounds
    changed = [
        f"{key} was {before.get(key)!r} and is {value!r}"
        for key, value in config.flat().items()
        if key not in may_change and before.get(key) != value
    ]
    if changed:
        raise ConfigError(
            f'resume = "{directory}": a run goes on with the config it began with:\n  '
            + "\n  ".join(changed)
        )
    try:
        with safe_open(files[-1], framework="pt") as content:
            fields = json.loads(content.metadata()["checkpoint"])
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError) as error:
        raise ConfigError(f"{files[-1]} can't be read: {error}") from error
    return Checkpoint(
        **fields,
        state=_with_prefix(tensors, "adapter."),
        importance=_with_prefix(tensors, "importance.") or None,
        optimizers=_with_prefix(tensors, "optimizers.") or None,
    )


def check_base_model(directory: Path, fingerprint: Mapping[str, str]) -> None:
    """Compare the base model with the one that a run began with.

    Raises:
        ConfigError: it is another one now.

    """
    before = json.loads((directory / "base-model.json").read_text())["digests"]
    # Shards of other parties may have come into the same folder since.
    odd = [name for name in differences(before, fingerprint) if name in before]
    if odd:
        raise ConfigError(
            f'resume = "{directory}": the base model is not the one that the run began with: '
            f"{', '.join(odd[:3])}{' …' if len(odd) > 3 else ''} differ"
        )


def _with_prefix(tensors: State, prefix: str) -> State:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _path(directory: Path, round_number: int) -> Path:
    return directory / "checkpoints" / f"round-{round_number:04d}.safetensors"


def _all(directory: Path) -> list[Path]:
    return sorted((directory / "checkpoints").glob("round-*.safetensors"))
