"""What a run says of its adapters, at the coordinator or at a client: base model and settings."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chambers.errors import CommandError

_CONFIG = "config.json"
_BASE = "base-model.json"


@dataclass(frozen=True)
class RunFolder:
    """What a run has left.

    Attributes:
        directory: the run's folder, or that of a client's state.
        config: the resolved run config, dotted keys to values.
        digests: of the base model, as far as it was there.

    """

    directory: Path
    config: Mapping[str, Any]
    digests: Mapping[str, str]

    @property
    def clients(self) -> list[str]:
        """Names of the clients that have personalised adapters."""
        folders = (self.directory / "adapters" / "clients").glob("*")
        return sorted(folder.name for folder in folders if folder.is_dir())


def read_run(directory: Path) -> RunFolder:
    """Read a run's folder.

    Raises:
        CommandError: it isn't one.

    """
    try:
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        digests = json.loads((directory / _BASE).read_text(encoding="utf-8"))["digests"]
        return RunFolder(directory, {**config}, {**digests})
    except OSError as error:
        raise CommandError(
            f"{directory} is not a run's folder: {error.strerror}: {error.filename}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"{_CONFIG} or {_BASE} in {directory} is not what a run writes: {error}"
        ) from error


def run_of(adapter: Path) -> RunFolder | None:
    """Give the run whose folder, or client's state, an adapter lies in; None if it's elsewhere."""
    for folder in adapter.resolve().parents:
        if folder.name == "adapters" and (folder.parent / _BASE).is_file():
            return read_run(folder.parent)
    return None
