"""The effect of the penalty of FedJudge-CL: ``python -m bench.continual FOLDER``.

    python -m bench.continual FOLDER [--model MODEL] [--seeds 5] [--shares 1 10 50]
    python -m bench.continual FOLDER --lambdas 0.003 0.03 1 --importance server

Three generated clients of shifted styles train by FedJudge-Base, and by FedJudge-CL with several λ
and with the importance of either kind. λ is given, or found such that the penalty has a given share
of the gradient norm: on the first seed, in round 2, without a look at any held-out loss. All runs
of a seed have the same data, initial adapter, dropout and round 1, in which no penalty applies, so
that their losses are compared in pairs; intervals are Student's over seeds.

FOLDER has a file for each run; the same command continues where it was interrupted, and writes
``table.md`` at the end.
"""

import argparse
import json
import os
import statistics
import tomllib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict, parse_config_args

from bench.continual_cells import Experiment, calibrate, cell, first_round
from finetuning.files import replacing
from strategies.run_config import ConfigError, parse_run_config

_PRESET = Path(__file__).parent.parent / "presets" / "demo.toml"
_HEADINGS = (
    *("importance", "share wanted", "λ", "share measured", "s"),
    *("held-out loss, global", "− FedJudge-Base [95 %]"),
    *("held-out loss, personalised", "− FedJudge-Base [95 %]"),
)
Result = dict[str, Any]
# Importance, share that was wanted if any, and λ.
Row = tuple[str, float | None, float]


def main() -> None:
    """Run what is not in the folder yet, and print the table."""
    arguments = _arguments()
    experiment = Experiment(arguments.folder, _settings(arguments))
    seeds = list(range(arguments.seeds))
    _claim(experiment)
    processes = arguments.processes
    os.environ["TQDM_DISABLE"] = "1"  # for all processes that are started
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_use, initargs=(threads,)
    ) as pool:
        list(pool.map(partial(first_round, experiment), seeds))
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
                zip(arguments.importance, pool.map(find, arguments.importance), strict=True)
            )
            rows = [
                (importance, share, found[importance][share])
                for importance in arguments.importance
                for share in shares
            ]
        weights = [("server", 0.0), *((importance, weight) for importance, _, weight in rows)]
        futures = {
            (importance, weight): [
                pool.submit(cell, experiment, seed, weight, importance) for seed in seeds
            ]
            for importance, weight in weights
        }
        results = {key: [future.result() for future in own] for key, own in futures.items()}
    text = table(rows, results)
    with replacing(experiment.folder / "table.md") as aside:
        aside.write_text(text)
    print(text, end="")


def table(rows: Sequence[Row], results: dict[tuple[str, float], list[Result]]) -> str:
    """Return the table in Markdown.

    Args:
        rows: What to show, FedJudge-Base excepted, which comes first.
        results: Results of `cell` by importance and λ, in the order of seeds; FedJudge-Base's are
            those of ``("server", 0.0)``.

    """
    base = results["server", 0.0]
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), ("–", "–", "0", *_measured(base, base))]
    for importance, share, weight in rows:
        wanted = "–" if share is None else f"{100 * share:g} %"
        measured = _measured(results[importance, weight], base)
        lines.append((importance, wanted, f"{weight:g}", *measured))
    seeds = [result["seed"] for result in base]
    about = f"Means over {len(seeds)} seeds; after ± their standard deviation.\n\n"
    return about + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def paired_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences, and its 95 % interval by Student's t.

    Raises:
        ValueError: There are fewer than two.

    """
    if len(differences) < 2:
        raise ValueError("an interval needs at least two pairs")
    from scipy.stats import t

    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    half = float(t.ppf(0.975, len(differences) - 1)) * error
    return mean, mean - half, mean + half


def _measured(own: list[Result], base: list[Result]) -> tuple[str, ...]:
    """Return the cells from the measured share on."""
    cells = [
        f"{100 * statistics.mean(r['share'] for r in own):.1f} %",
        _spread([r["distance"] for r in own]),
    ]
    for model in ("global", "personalised"):
        losses, before = ([_mean_loss(r, model) for r in each] for each in (own, base))
        cells.append(_spread(losses))
        pairs = [loss - other for loss, other in zip(losses, before, strict=True)]
        cells.append("–" if own is base else _interval(pairs))
    return tuple(cells)


def _mean_loss(result: Result, model: str) -> float:
    return float(statistics.mean(result[model].values()))


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def _interval(differences: list[float]) -> str:
    if len(differences) < 2:
        return f"{differences[0]:+.4f}"
    mean, low, high = paired_interval(differences)
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


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
        rounds = parse_run_config(values).rounds
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    if rounds < 2:
        raise SystemExit("the penalty applies from round 2 on; give at least two rounds")
    # Losses after the last round are all that is compared.
    return values | {"evaluate.every": rounds}


def _claim(experiment: Experiment) -> None:
    """Write the settings to the folder, or compare them.

    Raises:
        SystemExit: The folder's results have other settings.

    """
    file, values = experiment.folder / "settings.json", dict(experiment.values)
    if not file.is_file():
        with replacing(file) as aside:
            aside.write_text(json.dumps(values, indent=1) + "\n")
    before = json.loads(file.read_text())
    if before != values:
        odd = sorted(k for k in before.keys() | values.keys() if before.get(k) != values.get(k))
        raise SystemExit(
            f"{experiment.folder} has results with other settings ({', '.join(odd)} differ); name "
            "another folder"
        )


def _use(threads: int) -> None:
    """Limit the threads of a process."""
    import torch

    torch.set_num_threads(min(threads, torch.get_num_threads()))


if __name__ == "__main__":
    main()
