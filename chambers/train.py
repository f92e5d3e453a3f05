"""``chambers train``: a run in simulation on this machine."""

import argparse
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from chambers.errors import CommandError

HELP = "train in simulation on this machine"
DESCRIPTION = """\
Train in simulation on this machine, where every client's work is done: one run, beginning to end.
Without settings three generated clients fine-tune the embedded tiny model.

  chambers train presets/demo.toml
  chambers train presets/fedjudge.toml data.path=/data/legal model.name=/models/qwen rounds=3
  chambers train strategy=fl-glm split.schedule=client-batch --clients 4

docs/configuration.md has every key; relative paths begin here. The last lines say where the results
are. Runs of real institutions are started with: flwr run . deployment --stream
"""

_GENERATED_CLIENTS = 3
_PATHS_OR_NAMES = {"data.path", "model.name"}
_PATHS = _PATHS_OR_NAMES | {"output-dir", "state-path", "resume"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="PRESET.toml|KEY=VALUE",
        help="settings of the run: files of them, and single keys, which go first",
    )
    parser.add_argument(
        "--clients",
        type=int,
        metavar="N",
        help="how many are simulated; as many as data.path has folders, else 3",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit status is 0 only if the run completed."""
    from chambers.simulation import CHECKOUT, simulate
    from strategies.run_config import ConfigError, parse_run_config

    if not (CHECKOUT / "pyproject.toml").is_file():
        raise CommandError(
            f"Flower runs the app from its checkout, and {CHECKOUT} is none; install it from there "
            "with: pip install --editable ."
        )
    config = _config_of(arguments.settings)
    clients = arguments.clients
    if clients is None:
        clients = _clients_in(str(config.get("data.path", "")))
    if clients < 1:
        raise CommandError(f"--clients {clients}: there must be at least one")
    config.setdefault("min-nodes", clients)
    try:
        parse_run_config(config)
    except ConfigError as error:
        raise CommandError(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="chambers-") as home:
        return simulate(config, clients, Path(home))


def _config_of(settings: list[str]) -> dict[str, Any]:
    """Put presets and single keys together."""
    from flwr.common.config import flatten_dict

    presets: dict[str, Any] = {}
    keys: dict[str, Any] = {}
    for setting in settings:
        if "=" in setting:
            keys |= _parse_keys(setting)
            continue
        try:
            presets |= flatten_dict(tomllib.loads(Path(setting).read_text(encoding="utf-8")))
        except OSError as error:
            raise CommandError(
                f"{setting} is neither KEY=VALUE nor a file of settings: {error.strerror}"
            ) from error
        except ValueError as error:
            raise CommandError(f"{setting} is not a file of settings: {error}") from error
    return _from_here(presets | keys)


def _from_here(config: dict[str, Any]) -> dict[str, Any]:
    """Make relative paths absolute: the app runs in another folder."""
    result = dict(config)
    for key in _PATHS & config.keys():
        path = Path(str(config[key])).expanduser()
        # A name that nothing here has may be one of the Hugging Face hub.
        if config[key] and (key not in _PATHS_OR_NAMES or path.exists()):
            result[key] = str(path.absolute())
    if config.get("model.name") == "tiny":
        result["model.name"] = "tiny"
    return result


def _parse_keys(setting: str) -> dict[str, Any]:
    """Parse what a shell leaves of ``KEY=VALUE``, where text may have lost its quotation marks."""
    from click import ClickException
    from flwr.common.config import parse_config_args

    try:
        return dict(parse_config_args([setting]))
    except ClickException:
        key, _, value = setting.partition("=")
        return {key.strip(): value.strip()}


def _clients_in(path: str) -> int:
    from finetuning.data.rows import DataError, find_part

    if not path:
        return _GENERATED_CLIENTS
    try:
        folders = [f for f in Path(path).expanduser().glob("*") if f.is_dir()]
        return sum(find_part(f, "train") is not None for f in folders) or _GENERATED_CLIENTS
    except DataError as error:
        raise CommandError(str(error)) from error
