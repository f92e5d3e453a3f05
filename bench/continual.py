"""The effect of the penalty of FedJudge-CL: ``python -m bench.continual FOLDER``.

    python -m bench.continual FOLDER [--model MODEL] [--seeds 5] [--shares 1 10 50]
    python -m bench.continual FOLDER --lambdas 0.003 0.03 1 --importance server

Three generated clients of shifted styles train by FedJudge-Base, and by FedJudge-CL with several λ
and with the importance of either kind. λ is given, or found such that the penalty has a given share
of the gradient norm: on the first seed, in round 2, without a look at any held-out loss. All runs
of a seed have the same data, initial adapter, dropout and round 1, in which no penalty applies, so
that their losses are compared in pairs; intervals are Student's over seeds.

FOLDER has a file for each run; the same command continues where it was interrupted, and writes
``table.md`` at the end. ``--record docs/recorded/continual.json`` also writes the results as JSON,
of which ``python -m bench.paper`` makes a part of ``docs/reproduction.md``.
"""

import argparse
import json
import os
import signal
import tomllib
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict, parse_config_args

from bench.continual_cells import Experiment, calibrate, cell, first_round
from bench.continual_table import Row, recorded, table
from bench.pool import pool
from federation.run_config import ConfigError, parse_run_config
from finetuning.files import replacing, write_json
from finetuning.model.base_model import locate
from finetuning.model.fingerprint import digest, fingerprint

_LIBRARIES = ("torch", "transformers", "peft")
_PRESET = Path(__file__).parent.parent / "presets" / "tiny.toml"


def main() -> None:
    """Run what is not in the folder yet, and print the table."""
    arguments = _arguments()
    experiment = Experiment(arguments.folder, _settings(arguments))
    seeds = list(range(arguments.seeds))
    provenance = _provenance(experiment)
    _claim(experiment, provenance)
    with pool(arguments.processes) as executor:
        list(executor.map(partial(first_round, experiment), seeds))
        rows: list[Row]
        if arguments.lambdas:
            rows = [
                (importance, None, weight)
                for importance in arguments.importance
                for weight in arguments.lambdas
            ]
        else:
            shares = [share / 100 for share in arguments.shares]
            find = partial(calibrate, experiment, seeds[0], shares=shares)
            found = dict(
                zip(arguments.importance, executor.map(find, arguments.importance), strict=True)
            )
            rows = [
                (importance, share, found[importance][share])
                for importance in arguments.importance
                for share in shares
            ]
        weights = [("server", 0.0), *((importance, weight) for importance, _, weight in rows)]
        futures = {
            (importance, weight): [
                executor.submit(cell, experiment, seed, weight, importance) for seed in seeds
            ]
            for importance, weight in weights
        }
        results = {key: [future.result() for future in own] for key, own in futures.items()}
    text = table(rows, results)
    with replacing(experiment.folder / "table.md") as aside:
        aside.write_text(text)
    if arguments.record:
        record = recorded(experiment.values, provenance, rows, results)
        write_json(arguments.record, record)
    print(text, end="")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="tiny", help="model.name: a folder, id, or tiny")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--shares", type=_share, nargs="+", default=[1.0, 10.0, 50.0], metavar="%")
    parser.add_argument("--lambdas", type=float, nargs="+", help="λ instead of shares")
    kinds = ["server", "client"]
    parser.add_argument("--importance", choices=kinds, nargs="+", default=kinds)
    parser.add_argument("--preset", type=Path, default=_PRESET)
    parser.add_argument("--run-config", default="", help="overrides of the preset: 'key=value …'")
    parser.add_argument("--record", type=Path, help="file for the results as JSON")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, help="runs at the same time")
    return parser.parse_args()


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError("must be between 0 and 100")
    return value


def _settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the run config of all runs.

    Raises:
        SystemExit: It is wrong.

    """
    overrides = parse_config_args([arguments.run_config] if arguments.run_config else [])
    values = flatten_dict(tomllib.loads(arguments.preset.read_text())) | overrides
    model = Path(arguments.model)
    name = str(model.absolute()) if model.is_dir() else arguments.model
    values |= {"model.name": name, "evaluate.generate": False}
    values.pop("continual.lambda", None)
    try:
        config = parse_run_config(values)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    if config.rounds < 2:
        raise SystemExit("the penalty applies from round 2 on; give at least two rounds")
    return values | {
        "rounds": config.rounds,
        "train.local-steps": config.train.local_steps,
        # Losses after the last round are all that is compared.
        "evaluate.every": config.rounds,
    }


def _claim(experiment: Experiment, provenance: dict[str, Any]) -> None:
    """Write the settings to the folder, or compare them.

    Raises:
        SystemExit: The folder's results have other settings.

    """
    file = experiment.folder / "settings.json"
    values = dict(experiment.values) | provenance
    if not file.is_file():
        write_json(file, values)
    before = json.loads(file.read_text())
    if before != values:
        other = sorted(k for k in before.keys() | values.keys() if before.get(k) != values.get(k))
        raise SystemExit(
            f"{experiment.folder} has results with other settings ({', '.join(other)} differ); "
            "name another folder"
        )


def _provenance(experiment: Experiment) -> dict[str, Any]:
    """Return what results depend on besides the run config: the base model, and versions."""
    return {
        "model digest": digest(fingerprint(locate(experiment.values["model.name"]))),
        "versions": {library: version(library) for library in _LIBRARIES},
    }


if __name__ == "__main__":
    # So that the processes that measure end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
