"""``chambers train``: run a simulation on this machine or on a Ray cluster."""

import os
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chambers.actors import checkpoint_of, count_actors, describe_memory, resources_of, this_machine
from chambers.app_folder import PROJECT, describe_presets, presets, write_app
from chambers.cluster import join
from chambers.data import check_data
from chambers.errors import CommandError
from chambers.sources import argument, count
from chambers.steps import OWN_ROWS, count_rows, describe_steps, suited
from federation.run_config import RunConfig, Scalar, leaves, parse_run_config
from federation.run_folder import METRICS, check_resumable, read_events, results_folder
from finetuning.adapters.saved import AdapterError, check_folder
from finetuning.data.files import client_folders
from finetuning.data.formats import is_hub_id
from finetuning.model.checkpoint import count_blocks, find_missing_shards, find_problem
from finetuning.model.names import BUILT_IN, TINY, resolve

GENERATED_CLIENTS = 3
_PATHS_OR_NAMES = {"data.path", "model.name"}
_PATHS = _PATHS_OR_NAMES | {"output-dir", "state-path", "resume", "initial-adapter"}


@dataclass(frozen=True)
class Train:
    """Train in simulation on this machine, or on a Ray cluster.

    Without settings, three clients with generated data fine-tune the built-in tiny model.

    \b
      chambers train demo
      chambers train fedjudge data.path=/data/legal model.name=/models/qwen rounds=3
      chambers train strategy=fl-glm split.schedule=client-batch --clients 4

    Settings are names of presets, TOML files and KEY=VALUE pairs; pairs take precedence.
    docs/configuration.md describes every key. Relative paths are relative to the current folder.
    The last lines of the output name the folder with the results. In this folder, log.txt contains
    the output of Flower, the ServerApp and the clients. docs/deployment.md describes runs with real
    institutions.

    Flower's SuperLink listens on loopback without authentication: while the command runs, other
    users of this machine can run code as you.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    settings: Annotated[list[str] | None, argument("[PRESET|FILE.toml|KEY=VALUE]…")] = None
    clients: Annotated[
        int | None, count("Number of clients; default: one per folder in data.path, else 3.")
    ] = None
    ray: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Head of a Ray cluster to run on.")
    ] = None
    plan: Annotated[
        bool, typer.Option("--plan", help="Only print what the run will take: steps, memory, time.")
    ] = False
    presets: Annotated[bool, typer.Option("--presets", help="List the presets.")] = False
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the run's log too.")] = False

    def __call__(self) -> int:
        """Train; return 0 only if the run completed."""
        if self.presets:
            print(*describe_presets(), sep="\n")
            return 0
        values, clients, longest = self._read()
        config = parse_run_config(app_config() | values)
        at_once = config.sampled(clients)
        fitted = config.with_max_length(longest)  # to estimate the memory
        if self.plan:
            from chambers.run_plan import describe_run

            print(*describe_run(fitted, clients), sep="\n")
            return 0
        from chambers.simulation import simulate
        from finetuning.model.locating import locate

        if config.model.name == TINY:
            locate(TINY)  # prints a line if it must be built
        with tempfile.TemporaryDirectory(prefix="chambers-") as home:
            if self.ray:
                make_folders(config)
                app = write_app(Path(home) / "app")
                actors, resources, here = join(self.ray, config, at_once, app)
                # The default is an address that the other hosts can't reach.
                values.setdefault("split.listen", f"{here}:0")
            else:
                os.environ["RAY_ADDRESS"] = "local"  # otherwise, Ray would join a running cluster
                machine = this_machine()  # slow, since it imports PyTorch
                actors = count_actors(fitted, at_once, machine)
                resources = resources_of(actors, machine.gpus)
                checkpoint = checkpoint_of(config)
                if checkpoint and machine.gpu_memory:
                    print(describe_memory(fitted, checkpoint, actors, machine), file=sys.stderr)
                make_folders(config)
            if actors < at_once:
                print(f"{at_once} clients take turns on {actors} actors", file=sys.stderr)
            return simulate(
                config=values,
                clients=clients,
                resources=resources,
                home=Path(home),
                results=results_folder(config.output_dir),
                verbose=self.verbose,
            )

    def _read(self) -> tuple[dict[str, Any], int, int]:
        """Read and check settings and data; print how many steps the clients will take.

        Return the settings, the number of clients, and the tokens of the longest row.
        """
        named = self.settings or []
        values = read_settings(named)
        own = bool(values.get("data.path")) and all("=" in setting for setting in named)
        if own:
            print(f"settings that aren't named are from the preset {OWN_ROWS}", file=sys.stderr)
            values = read_settings([OWN_ROWS]) | values
        clients = self.clients or count_clients(values)
        # The default of min-nodes depends on ``sample``.
        config = parse_run_config(app_config() | {"min-nodes": 1} | values)
        values.setdefault("min-nodes", config.sampled(clients))
        config = parse_run_config(app_config() | values)
        if config.min_nodes > clients:
            raise CommandError(
                f"min-nodes = {config.min_nodes} is more than the {clients} simulated clients; "
                f"add --clients {config.min_nodes}"
            )
        _check_model(config)
        if not own:
            check_run(config, clients)
        longest = check_data(config, clients) if config.data.path else config.data.max_length
        rows = count_rows(config, clients)
        if own:
            values = suited(rows, config.train.batch_size) | values
            config = parse_run_config(app_config() | values)
            check_run(config, clients)
        if clients > len(rows):
            print(f"the first {len(rows)} of {clients} clients:", file=sys.stderr)
        print(*describe_steps(rows, config), sep="\n", file=sys.stderr)
        return values, clients, longest


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


def check_run(config: RunConfig, clients: int) -> None:
    """Check the initial adapter or the run to resume before the run starts.

    Raise ``CommandError`` if a file is missing or can't be used. Raise ``ConfigError`` if the run
    can't be resumed with this config.
    """
    if config.resume:
        run = Path(config.resume).expanduser()
        check_resumable(run, config)
        _check_clients(run, clients, config.sample)
    elif config.initial_adapter:
        try:
            check_folder(Path(config.initial_adapter).expanduser())
        except AdapterError as error:
            raise CommandError(f"initial-adapter: {error}") from error


def _check_clients(run: Path, clients: int, sample: float) -> None:
    """Check that a run is resumed with as many clients as before; else their rows would change.

    With ``sample`` < 1, only the clients that were drawn are known.
    """
    try:
        events = read_events(run / METRICS)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    rounds = [e for e in events if e["event"] in {"round", "evaluation-missing"}]
    names = {name for event in rounds for name in event.get("participants", [])}
    names |= {left["client"] for event in rounds for left in event.get("left_out", [])}
    # Include evaluations: a run may have ended in round 1, after evaluating the base model.
    names |= {event["client"] for event in events if event["event"] == "evaluate"}
    if names and (len(names) > clients or (sample == 1 and len(names) != clients)):
        raise CommandError(
            f"{run} has {len(names)} clients; with {clients}, the rows would be divided "
            f"differently: add --clients {len(names)}"
        )


def make_folders(config: RunConfig) -> None:
    """Create the folders that the run writes to; raise ``CommandError`` if one isn't writable."""
    for key, text in (("output-dir", config.output_dir), ("state-path", config.state_path)):
        if not text:
            continue
        directory = Path(text).expanduser()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise CommandError(f'{key} = "{directory}" can\'t be written to: {error}') from error


def app_config() -> dict[str, Any]:
    """Read the run config in ``pyproject.toml``, whose values Flower uses as defaults."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    return _flatten(project["tool"]["flwr"]["app"]["config"])


def _check_model(config: RunConfig) -> None:
    name = resolve(config.model.name)
    path = Path(name).expanduser()
    problem, blocks = None, None
    if name == TINY and config.strategy == "fl-glm":
        from finetuning.model.tiny import TinyRecipe

        blocks = TinyRecipe.blocks
    elif path.is_absolute():
        problem = find_problem(path) or find_missing_shards(path)
        blocks = None if problem else count_blocks(path)
    elif not is_hub_id(name):
        problem = "there is no such file or folder"
    if problem is not None:
        raise CommandError(f'model.name = "{name}": {problem}')
    if config.strategy == "fl-glm" and blocks is not None:
        problem = config.split.problem_with(blocks, name)
        if problem is not None:
            raise CommandError(problem)
