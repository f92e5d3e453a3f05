"""The effect of λ in FedJudge-CL: ``python -m bench.continual``.

Runs the demonstration's three clients with several λ and seeds, and prints a line per λ: the
distance of local adapters from the global one, weighted by importance; the penalty's share of the
gradient norm; and the held-out losses. λ = 0 is FedJudge-Base, bit for bit.
"""

import argparse
import os
import statistics
import tempfile
import tomllib
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict, parse_config_args
from rich.table import Table

from bench.harness import make_table, show

_PRESET = Path(__file__).parent.parent / "presets" / "demo.toml"
_CLIENTS = 3
Event = dict[str, Any]


def run(weight: float, seed: int, overrides: list[str]) -> list[Event]:
    """Run the demonstration with one λ and one seed, and return its events."""
    import logging

    import torch

    from bench.in_process import run_in_process

    torch.set_num_threads(1)
    logging.getLogger("flwr").setLevel("WARNING")
    values = flatten_dict(tomllib.loads(_PRESET.read_text())) | parse_config_args(overrides)
    values |= {"continual.lambda": weight, "seed": seed, "evaluate.generate": False}
    with tempfile.TemporaryDirectory() as state:
        return run_in_process(values, Path(state), _CLIENTS).events


def main() -> None:
    """Run every λ with every seed, one run per core at a time, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lambdas", type=float, nargs="+", default=[0.0, 0.003, 0.03, 1.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--run-config", default="", help="overrides of presets/demo.toml: 'key=value …'"
    )
    arguments = parser.parse_args()
    overrides = [arguments.run_config] if arguments.run_config else []
    seeds = range(arguments.seeds)
    cells = [(weight, seed) for weight in arguments.lambdas for seed in seeds]
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        futures = {cell: pool.submit(run, *cell, overrides) for cell in cells}
        events = {cell: future.result() for cell, future in futures.items()}
    show(_table(arguments.lambdas, seeds, events))


def _table(
    weights: list[float], seeds: Iterable[int], events: dict[tuple[float, int], list[Event]]
) -> Table:
    table = make_table(
        f"FedJudge-CL, mean ± standard deviation over {len(list(seeds))} seeds",
        *("λ", "mean J·|δ|", "s", "penalty's share\nof gradient norm"),
        *("held-out loss\nglobal", "\npersonalised", "global − λ=0\n(same seed)"),
    )
    for weight in weights:
        runs = [events[weight, seed] for seed in seeds]
        table.add_row(
            f"{weight:g}",
            _spread([_train(run, "mean_importance_distance") for run in runs], ".2e"),
            _spread([_train(run, "importance_distance") for run in runs], ".2f"),
            _spread([100 * _train(run, "penalty_gradient_share") for run in runs], ".0f") + " %",
            _spread([_final_loss(run, "global") for run in runs], ".3f"),
            _spread([_final_loss(run, "personalised") for run in runs], ".3f"),
            _spread(
                [
                    _final_loss(events[weight, seed], "global")
                    - _final_loss(events[0.0, seed], "global")
                    for seed in seeds
                ],
                "+.3f",
            )
            if 0.0 in weights
            else "-",
        )
    return table


def _train(events: list[Event], key: str) -> float:
    """Return a training metric's mean over the clients and rounds that report it."""
    return float(statistics.mean(e[key] for e in events if e["event"] == "train" and key in e))


def _final_loss(events: list[Event], model: str) -> float:
    """Return the mean of a model's last held-out losses over clients."""
    losses = {
        e["client"]: e["loss"] for e in events if e["event"] == "evaluate" and e["model"] == model
    }
    return float(statistics.mean(losses.values()))


def _spread(values: list[float], form: str) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {deviation:{form.lstrip('+')}}"


if __name__ == "__main__":
    main()
