"""``chambers train``: run a simulation on this machine or on a Ray cluster."""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from chambers.actors import (
    count_actors,
    describe_memory,
    find_base_checkpoint,
    resources_of,
    this_machine,
)
from chambers.allocator import allocator_variables
from chambers.app_folder import describe_presets, write_app
from chambers.cluster import join
from chambers.data import check_data
from chambers.errors import CommandError
from chambers.settings import count_clients, read_settings, with_least_nodes
from chambers.sources import argument, count
from chambers.steps import OWN_ROWS, describe_steps, read_clients, suited
from federation.run_config import RunConfig, parse_run_config
from federation.run_folder import METRICS_FILE, check_resumable, read_events, results_folder
from finetuning.adapters.saved import AdapterError, check_folder
from finetuning.data.formats import is_hub_id
from finetuning.errors import BaseModelError
from finetuning.model.checkpoint import check_checkpoint, count_blocks, refuse_missing_shards
from finetuning.model.names import TINY, resolve

if TYPE_CHECKING:
    from client_app.data import ClientData  # slow, since it imports PyTorch


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
        run = self._read()
        config, clients = run.config, run.clients
        at_once = config.sampled(clients)
        fitted = config.with_max_length(run.longest)  # to estimate the memory
        if self.plan:
            from chambers.run_plan import describe_run

            print(*describe_run(fitted, clients, run.data), sep="\n")
            return 0
        if run.has_own_rows and not self.ray:
            from chambers.run_plan import describe_time

            print(describe_time(fitted, clients, run.data), file=sys.stderr)
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
                run.values.setdefault("split.listen", f"{here}:0")
            else:
                os.environ["RAY_ADDRESS"] = "local"  # otherwise, Ray would join a running cluster
                machine = this_machine()  # slow, since it imports PyTorch
                actors = count_actors(fitted, at_once, machine)
                resources = resources_of(actors, machine.gpus)
                checkpoint = find_base_checkpoint(config)
                if checkpoint and machine.gpu_memory:
                    print(describe_memory(fitted, checkpoint, actors, machine), file=sys.stderr)
                make_folders(config)
            os.environ |= allocator_variables()  # which the run's processes inherit
            if actors < at_once:
                print(f"{at_once} clients take turns on {actors} actors", file=sys.stderr)
            return simulate(
                config=run.values,
                clients=clients,
                resources=resources,
                home=Path(home),
                results=results_folder(config.output_dir),
                verbose=self.verbose,
            )

    def _read(self) -> "_Run":
        """Read and check settings and data; print how many steps the clients will take."""
        named = self.settings or []
        values = read_settings(named)
        own = bool(values.get("data.path")) and all("=" in setting for setting in named)
        if own:
            print(f"settings that aren't named are from the preset {OWN_ROWS}", file=sys.stderr)
            values = read_settings([OWN_ROWS]) | values
        shown = "evaluate.show-answers"
        if values.get("sums.enabled") and values.get(shown) and not _names(named, shown):
            print(f"{shown} = 0, since sums.enabled = true hides clients' answers", file=sys.stderr)
            values[shown] = 0
        clients = self.clients or count_clients(values)
        # The default of min-nodes depends on ``sample``.
        config = parse_run_config(with_least_nodes(values))
        values.setdefault("min-nodes", config.sampled(clients - len(config.excluded)))
        config = parse_run_config(values)
        if config.min_nodes > clients:
            raise CommandError(
                f"min-nodes = {config.min_nodes} is more than the {clients} simulated clients; "
                f"add --clients {config.min_nodes}"
            )
        _check_model(config)
        if not own:
            check_beginning(config, clients)
        longest = check_data(config, clients) if config.data.path else config.data.max_length
        data = read_clients(config, clients)
        rows = {client.name: len(client.train) for client in data}
        if own:
            values = suited(rows, config.train.batch_size) | values
            config = parse_run_config(values)
            check_beginning(config, clients)
        if clients > len(rows):
            print(f"the first {len(rows)} of {clients} clients:", file=sys.stderr)
        print(*describe_steps(rows, config), sep="\n", file=sys.stderr)
        return _Run(values, config, clients, data, longest, own)


def _names(settings: list[str], key: str) -> bool:
    return any(setting.partition("=")[0].strip() == key for setting in settings)


@dataclass(frozen=True)
class _Run:
    """A run whose settings and rows are checked."""

    values: dict[str, Any]  # the settings that aren't defaults
    config: RunConfig
    clients: int
    data: "list[ClientData]"  # the rows of the first clients
    longest: int  # tokens of the longest row
    has_own_rows: bool  # whether the preset is for a user's own rows


def check_beginning(config: RunConfig, clients: int) -> None:
    """Check the initial adapter or the run to resume before the run starts.

    Raise ``CommandError`` if a file is missing or can't be used. Raise ``ConfigError`` if the run
    can't be resumed with this config.
    """
    if config.resume:
        run = Path(config.resume).expanduser()
        check_resumable(run, config)
        check_clients(run, clients, config)
    elif config.initial_adapter:
        try:
            check_folder(Path(config.initial_adapter).expanduser())
        except AdapterError as error:
            raise CommandError(f"initial-adapter: {error}") from error


def check_clients(run: Path, clients: int, config: RunConfig) -> None:
    """Check that a run is resumed with as many clients as before; else their rows would change.

    With ``sample`` < 1, only the clients that were drawn are known.
    """
    try:
        events = read_events(run / METRICS_FILE)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    rounds = [e for e in events if e["event"] in {"round", "evaluation-missing"}]
    names = {name for event in rounds for name in event.get("participants", [])}
    names |= {left["client"] for event in rounds for left in event.get("left_out", [])}
    # Include evaluations: a run may have ended in round 1, after evaluating the base model.
    for event in events:
        if event["event"] == "evaluate":
            names |= set(event.get("clients", [event["client"]]))
    names |= config.excluded if names else set()
    if names and (len(names) > clients or (config.sample == 1 and len(names) != clients)):
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


def _check_model(config: RunConfig) -> None:
    name = resolve(config.model.name)
    path = Path(name).expanduser()
    blocks = None
    if name == TINY and config.method.is_split:
        from finetuning.model.tiny import TinyRecipe

        blocks = TinyRecipe.blocks
    elif path.is_absolute():
        try:
            check_checkpoint(path)
            refuse_missing_shards(path)
        except BaseModelError as error:
            raise CommandError(f'model.name = "{name}": {error}') from error
        blocks = count_blocks(path)
    elif not is_hub_id(name):
        raise CommandError(f'model.name = "{name}": there is no such file or folder')
    if config.method.is_split and blocks is not None:
        problem = config.split.problem_with(blocks, name)
        if problem is not None:
            raise CommandError(problem)
