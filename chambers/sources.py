"""Options that name a command's base model, adapter or run, and quick checks of them."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chambers.errors import CommandError
from finetuning.adapters.saved import SavedAdapter, check_folder
from finetuning.data.formats import is_hub_id
from finetuning.model.names import BUILT_IN
from finetuning.settings import ModelSettings

if TYPE_CHECKING:
    from finetuning.adapters.adapter import State
    from split.model.partition import Partition, PartyName

_CONFIG = "config.json"
_BASE = "base-model.json"
_SHOWN_NAMES = 3


def option(description: str, metavar: str | None = None) -> Any:
    """Declare an option; the description mentions the default if it is relevant.

    In paths, ``~`` is expanded, since shells don't expand it after ``--option=``.
    """
    return typer.Option(help=description, metavar=metavar, show_default=False, callback=_expand)


def count(description: str) -> Any:
    """Declare an option that is an integer of at least 1."""
    return typer.Option(help=description, metavar="N", show_default=False, min=1)


def argument(metavar: str) -> Any:
    """Declare a positional argument; ``~`` is expanded in paths, as in options."""
    return typer.Argument(metavar=metavar, show_default=False, callback=_expand)


def _expand(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand(item) for item in value]
    return value.expanduser() if isinstance(value, Path) else value


DRAFT = option(
    "How to draft tokens, which the model then verifies together to save round trips to a block "
    'server: "prompt" copies passages of the text so far; a file with rows also copies parts of '
    "their answers; an id or folder names a small model that drafts, with the same tokenizer. Only "
    "batches of one prompt have drafts.",
    "DRAFT",
)
BASE_MODEL = option("Base model; default: that of the adapter's run.", "NAME_OR_PATH")
INVITATION = option("Invitation to a block server, which runs the middle blocks.", "FILE")


def check_output(file: Path) -> None:
    """Raise ``CommandError`` unless the file of ``--output`` can be written."""
    folder = file.absolute().parent
    if not folder.is_dir():
        raise CommandError(f"--output {file}: there is no folder {folder}")
    if file.is_dir():
        raise CommandError(f"--output {file}: that is a folder")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"--output {file} can't be written: {error.strerror}") from error


def check_new_folder(folder: Path) -> None:
    """Raise ``CommandError`` if a folder exists, or can't be created."""
    if folder.exists():
        raise CommandError(f"{folder} exists; name a folder that doesn't")
    above = next(each for each in folder.absolute().parents if each.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "no permission" if above.is_dir() else "not a folder"
        raise CommandError(f"{folder} can't be created in {above}: {reason}")


@dataclass(frozen=True, kw_only=True)
class BaseModelOptions:
    """Options of all commands that load a base model."""

    model: Annotated[str | None, BASE_MODEL] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"] | None,
        option(
            "Precision of the frozen weights; default: as in the run, else auto, which is bfloat16 "
            "on a GPU and float32 elsewhere."
        ),
    ] = None
    quantization: Annotated[
        Literal["none", "nf4", "int8"] | None,
        option("Quantisation of the frozen weights; default: as in the run, else none."),
    ] = None

    def with_adapter(self, folder: Path | None, model: str | None) -> "AdapterOptions":
        """Add an adapter, and set the model; raise ``UserError`` if a folder is missing."""
        options = AdapterOptions(
            model=model, dtype=self.dtype, quantization=self.quantization, adapter=folder
        )
        options.check_folders()
        return options


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(BaseModelOptions):
    """Options of all commands that load a base model with at most one adapter."""

    adapter: Annotated[Path | None, option("Folder of an exported adapter.", "FOLDER")] = None

    def check_folders(self) -> None:
        """Raise ``UserError`` if a given folder is missing, without importing heavy libraries."""
        if self.adapter:
            check_folder(self.adapter)
        if self.model:
            _check_base_model(self.model)

    def settings(
        self, adapter: SavedAdapter | None, run: "RunFolder | None", offered: str = ""
    ) -> ModelSettings:
        """Return the settings of the base model from the options or, by default, from the run.

        ``offered`` is the model's name at another party, used if the run's model isn't found here.
        Raise ``CommandError`` if no base model is named, or the named one isn't on this machine.
        """
        config: Mapping[str, Any] = run.config if run else {}
        base = adapter.base if adapter else ""
        # Of a folder, adapters have only the last part, which isn't an id.
        located = base if "/" in base or base in BUILT_IN else ""
        known = [config.get("model.name"), offered, located]
        names = [str(name) for name in ([self.model] if self.model else known) if name]
        if not names:
            only = f" (the adapter gives only the folder's name, {base})" if base else ""
            raise CommandError(f"no base model is named{only}: add --model NAME_OR_PATH")
        # Skip folders that exist only at another party: the adapter may name one on this machine.
        name = next((name for name in names if not _is_missing(name)), names[0])
        _check_base_model(name)
        return ModelSettings(
            name=absolute_name(name),
            dtype=self.dtype or config.get("model.dtype", "auto"),
            quantization=self.quantization or trained_on(adapter, run) or "none",
        )


@dataclass(frozen=True)
class RunFolder:
    """The results of a run, at the coordinator or at a client."""

    directory: Path  # folder of the run, or of a client's state
    config: Mapping[str, Any]  # the resolved run config: values by dotted key
    digests: Mapping[str, str]  # digests of the base model's tensors that this party had

    @property
    def clients(self) -> list[str]:
        """Names of the clients that have personalised adapters."""
        folders = (self.directory / "adapters" / "clients").glob("*")
        # Names of unfinished folders begin with a dot.
        return sorted(f.name for f in folders if f.is_dir() and not f.name.startswith("."))


def read_run(directory: Path) -> RunFolder:
    """Read a run's folder; raise ``CommandError`` if it isn't one."""
    try:
        config = json.loads((directory / _CONFIG).read_text(encoding="utf-8"))
        digests = json.loads((directory / _BASE).read_text(encoding="utf-8"))["digests"]
        return RunFolder(directory, {**config}, {**digests})
    except OSError as error:
        raise CommandError(
            f"{directory} is not a run's folder: {error.strerror}: {error.filename}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{_CONFIG} or {_BASE} in {directory} is malformed: {error}") from error


def find_run(adapter: SavedAdapter | None) -> RunFolder | None:
    """Return the run whose folder or client state contains the adapter; None if there is none."""
    for folder in adapter.directory.resolve().parents if adapter else ():
        if folder.name == "adapters" and (folder.parent / _BASE).is_file():
            return read_run(folder.parent)
    return None


def trained_on(adapter: SavedAdapter | None, run: RunFolder | None) -> Any:
    """Return the base model's quantisation in training, or None if it isn't known."""
    if run:
        return run.config.get("model.quantization", "none")
    # Copied adapters have the run's settings in their cards.
    card = adapter.directory / "README.md" if adapter else Path()
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    match = re.search(r"^model\.quantization = '(\w+)'$", text, re.MULTILINE)
    return match[1] if match else None


def global_adapter(run: Path) -> Path:
    """Return the folder of a run's global adapter; raise ``CommandError`` if there is none."""
    folder = run / "adapters" / "global"
    if not folder.is_dir():
        raise CommandError(f"{run} has no adapters/global: the run completed no round")
    return folder


def refuse_other_base(own: Mapping[str, str], expected: Mapping[str, str], what: str) -> None:
    """Raise ``CommandError`` if tensors that two base models share have different digests.

    An empty digest in ``expected`` means unknown; ``what`` describes the expected base model.
    """
    different = sorted(n for n, d in expected.items() if d and n in own and own[n] != d)
    if different:
        shown = ", ".join(different[:_SHOWN_NAMES])
        more = f" and {len(different) - _SHOWN_NAMES} more" if different[_SHOWN_NAMES:] else ""
        raise CommandError(
            f"the base model here is not {what}: the digests of {shown}{more} differ; name the "
            "same checkpoint with --model"
        )


def split_adapter(adapter: SavedAdapter, partition: "Partition") -> "dict[PartyName, State]":
    """Return each party's part of an adapter; raise ``CommandError`` if the adapter doesn't fit."""
    from split.model.adapters import take_apart

    try:
        return take_apart(adapter.state, partition)
    except ValueError as error:
        raise CommandError(
            f"the adapter in {adapter.directory} is not for this base model: {error}"
        ) from error


def absolute_name(name: str) -> str:
    """Return the absolute path of a base model's folder or file; return other names unchanged."""
    here = Path(name).expanduser()
    if name in BUILT_IN or not here.exists():
        return name
    return os.path.abspath(here)  # noqa: PTH100 - resolving would undo links of hub caches


def _is_missing(name: str) -> bool:
    path = Path(name).expanduser()
    return (path.is_absolute() or not is_hub_id(name)) and not path.exists()


def _check_base_model(name: str) -> None:
    if _is_missing(name):
        raise CommandError(
            f"there is no base model in {name} on this machine; name one with --model NAME_OR_PATH"
        )
