"""Check that a run can be resumed: it needs a checkpoint, and most settings must be unchanged."""

import json
from pathlib import Path

from federation.run_config import ConfigError, RunConfig

# Keys, besides ``evaluate.*`` and ``*-timeout``, that may change when a run is resumed: they don't
# affect training. (A different device rounds differently and draws different dropout masks, but a
# run may move to another machine. Time limits, like network failures, only affect which clients
# take part.)
_MAY_CHANGE = {
    "min-nodes",
    "late-replies",
    "output-dir",
    "state-path",
    "resume",
    "instruction-key",
    "data.path",
    "split.window",
    "split.body-devices",
    "split.body-hosts",
    "split.body-key",
    "split.listen",
    "split.advertise",
    "split.key-exchange",
    "split.rotate-keys-every",
}
FOLDER = "checkpoints"


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints in a run's folder, oldest first."""
    files = (directory / FOLDER).glob("round-*.safetensors")
    # Sort by number: as text, round-10000 would come before round-9999.
    return sorted(files, key=lambda file: int(file.stem.removeprefix("round-")))


def check_resumable(directory: Path, config: RunConfig) -> None:
    """Raise ``ConfigError`` unless a run has a checkpoint, and only permitted keys have changed.

    A key that didn't exist when the run began is treated as if it had its default value.
    """
    if not directory.is_dir():
        raise ConfigError(f'resume = "{directory}" is not a folder')
    if not checkpoint_files(directory):
        raise ConfigError(f'resume = "{directory}" has no checkpoint; start a new run')
    try:
        original = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        before = RunConfig().flat() | original
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'resume = "{directory}": config.json can\'t be read: {error}') from error
    may_change = set(_MAY_CHANGE)
    if config.train.schedule == "constant" and config.train.warmup_ratio == 0:
        may_change.add("rounds")  # other schedules depend on the number of rounds
    if config.split.schedule != "client-batch":
        # With ``client-batch``, the budget splits the clients' stacked batches into passes with
        # separate dropout masks, and the share cap scales gradients.
        may_change |= {"split.activation-budget", "split.share-cap"}
    changed = [
        f"{key} was {before[key]!r} and is {value!r}"
        for key, value in config.flat().items()
        if before[key] != value
        and not (key in may_change or key.startswith("evaluate.") or key.endswith("-timeout"))
    ]
    if changed:
        raise ConfigError(
            f'resume = "{directory}": a run must be resumed with its original config:\n  '
            + "\n  ".join(changed)
        )
