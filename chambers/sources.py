"""Which base model and adapter a command is to use, and whether they belong together."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chambers.errors import CommandError
from chambers.run_folder import RunFolder, run_of
from finetuning.adapters.adapter import State
from finetuning.adapters.saved import AdapterError, SavedAdapter, read_adapter
from finetuning.settings import ModelSettings
from split.model.adapters import take_apart
from split.model.cut import Cut, PartyName

_SHOWN_NAMES = 3


def adapter_of(directory: Path) -> SavedAdapter:
    """Read an adapter's folder.

    Raises:
        CommandError: it isn't one.

    """
    try:
        return read_adapter(directory.expanduser())
    except AdapterError as error:
        raise CommandError(str(error)) from error


def model_settings(
    arguments: argparse.Namespace,
    adapter: SavedAdapter | None,
    run: RunFolder | None,
    offered: str = "",
) -> ModelSettings:
    """Say which base model to load and how: as the arguments say, else as in the adapter's run.

    Args:
        arguments: with ``model``, ``dtype`` and ``quantization``, each of which may be None.
        adapter: that is to be used.
        run: that it came from.
        offered: a name that another party gave.

    Raises:
        CommandError: no base model is named, or it isn't on this machine.

    """
    config: Mapping[str, Any] = run.config if run else {}
    known = [config.get("model.name"), offered, adapter.base if adapter else ""]
    names = [str(name) for name in ([arguments.model] if arguments.model else known) if name]
    if not names:
        raise CommandError("which base model? give --model NAME_OR_FOLDER")
    # Another party's folder need not be on this machine, where one's own adapter may name another.
    name = next((name for name in names if not _is_missing(name)), names[0])
    here = Path(name).expanduser()
    if name != "tiny" and here.is_dir():
        name = os.path.abspath(here)  # noqa: PTH100 - resolving would undo links of hub caches
    elif here.is_absolute():
        raise CommandError(
            f"there is no base model in {name} on this machine; give --model NAME_OR_FOLDER"
        )
    return ModelSettings(
        name=name,
        dtype=arguments.dtype or config.get("model.dtype", "auto"),
        quantization=arguments.quantization or config.get("model.quantization", "none"),
    )


def _is_missing(name: str) -> bool:
    path = Path(name).expanduser()
    return path.is_absolute() and not path.is_dir()


def find_run(adapter: SavedAdapter | None) -> RunFolder | None:
    """Give the run whose folder an adapter lies in."""
    return None if adapter is None else run_of(adapter.directory)


def refuse_other_base(own: Mapping[str, str], expected: Mapping[str, str], what: str) -> None:
    """Compare digests of base models, as far as both sides have them.

    Args:
        own: of the base model here.
        expected: of the one that it should be; empty digests are unknown.
        what: says whose that is.

    Raises:
        CommandError: they differ.

    """
    different = sorted(n for n, d in expected.items() if d and n in own and own[n] != d)
    if different:
        shown = ", ".join(different[:_SHOWN_NAMES])
        more = f" and {len(different) - _SHOWN_NAMES} more" if different[_SHOWN_NAMES:] else ""
        raise CommandError(
            f"the base model here is not {what}: {shown}{more} differ; give --model the same "
            "checkpoint"
        )


def parts_of(adapter: SavedAdapter, cut: Cut) -> dict[PartyName, State]:
    """Give each party's part of an adapter for generating through lanes.

    Raises:
        CommandError: it can't be divided so.

    """
    try:
        return take_apart(adapter.state, cut)
    except ValueError as error:
        raise CommandError(
            f"the adapter in {adapter.directory} is not for this base model: {error}"
        ) from error
