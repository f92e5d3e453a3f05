"""Settings of runs: presets, files and ``KEY=VALUE`` pairs, and the defaults that they replace."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chambers.app_folder import presets
from chambers.errors import CommandError
from federation.run_config import RunConfig, Scalar, leaves
from federation.sum_settings import MIN_GROUP
from finetuning.data.files import client_folders
from finetuning.model.names import BUILT_IN

GENERATED_CLIENTS = 3
_PATHS_OR_NAMES = {"data.path", "model.name"}
_PATHS = _PATHS_OR_NAMES | {"output-dir", "state-path", "resume", "initial-adapter", "sums.members"}


def read_settings(settings: list[str]) -> dict[str, Any]:
    """Merge presets, files and ``KEY=VALUE`` pairs; convert relative paths to absolute paths.

    Raise ``CommandError`` if a setting is none of these.
    """
    tables: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for setting in settings:
        key, assigned, text = setting.partition("=")
        if assigned:
            keys[key.strip()] = _parse_value(key.strip(), text.strip())
            continue
        file = Path(setting)
        if not file.is_file():
            file = presets().get(setting, file)
        try:
            tables |= _flatten(tomllib.loads(file.read_text("utf-8-sig")))
        except OSError as error:
            raise CommandError(
                f"{setting} is neither KEY=VALUE nor a file of settings ({error.strerror}) nor a "
                f"preset ({', '.join(presets())})"
            ) from error
        except ValueError as error:
            raise CommandError(f"{setting} is not a file of settings: {error}") from error
    return with_absolute_paths(tables | keys)


def with_least_nodes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Add the smallest valid ``min-nodes``, unless it is set, to check the other settings."""
    return {"min-nodes": MIN_GROUP if settings.get("sums.enabled") else 1, **settings}


def with_absolute_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make relative paths absolute, since Flower runs the app in a different folder."""
    values = dict(settings)
    for key in _PATHS & values.keys():
        path = Path(str(values[key])).expanduser()
        # A name that is not an existing file may be an id on the Hugging Face Hub.
        if values[key] and (key not in _PATHS_OR_NAMES or path.exists()):
            values[key] = str(path.absolute())
    if (name := settings.get("model.name")) in BUILT_IN:
        values["model.name"] = name
    return values


def _parse_value(key: str, text: str) -> Scalar:
    """Parse a TOML scalar; strings need no quotation marks, since the shell removes them."""
    # The value of a setting that is text may look like a number: data.pool=1.
    is_text = any(own == key and field.annotation is str for own, field, _ in leaves(RunConfig()))
    if is_text and not text.startswith(("'", '"')):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return value if isinstance(value, str | int | float | bool) else text


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Convert nested sections to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def count_clients(settings: Mapping[str, Any]) -> int:
    """Return the default number of clients: 1 for pooled data, else the number of folders, or 3."""
    if settings.get("data.pool"):
        return 1
    path = str(settings.get("data.path", ""))
    return len(client_folders(Path(path).expanduser()) if path else []) or GENERATED_CLIENTS
