"""How many steps clients take, and settings that suit their numbers of rows (docs/own-data.md)."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from federation.run_config import RunConfig
from finetuning.data.files import client_folders

if TYPE_CHECKING:
    from client_app.data import ClientData  # slow, since it imports PyTorch

# Preset for a user's own rows if the command names neither a preset nor a file.
OWN_ROWS = "own-rows"
# Most clients whose rows are read, and of one data set, which is read for each of them.
_MOST, _MOST_OF_ONE = 20, 3
# Sum of the learning rate over a client's steps below which the loss hardly falls
# (docs/own-data.md): a step of Adam moves no weight much further than the learning rate.
_ENOUGH = 5e-3
# Fewest steps of a round.
_FEWEST = 8
# Numbers of rows from which a step covers 4, 8, 16 times `train.batch-size` rows instead of twice.
_LARGER_STEPS = (128, 512, 2048)


def read_clients(config: RunConfig, clients: int) -> "list[ClientData]":
    """Read or generate the rows of the first simulated clients.

    Raise ``DataError`` if rows are missing or malformed.
    """
    from client_app.data import read_client_data

    is_one = bool(config.data.path) and not client_folders(Path(config.data.path).expanduser())
    counted = min(clients, _MOST_OF_ONE if is_one else _MOST)
    nodes = ({"partition-id": n, "num-partitions": clients} for n in range(counted))
    return [read_client_data(config.data, node, config.seed) for node in nodes]


def suited(rows: Mapping[str, int], batch_size: int) -> dict[str, Any]:
    """Return the settings that depend on the clients' numbers of training rows.

    With more rows, a step covers more of them, as its gradient is then less noisy and costs less.
    With few rows, a round has several epochs.
    """
    typical = max(1, median_low(rows.values()))
    accumulation = 2 ** (1 + sum(typical >= most for most in _LARGER_STEPS))
    steps = math.ceil(typical / (batch_size * accumulation))
    return {"train.accumulation": accumulation, "train.epochs": math.ceil(_FEWEST / steps)}


def describe_steps(rows: Mapping[str, int], config: RunConfig) -> list[str]:
    """Return lines with each client's number of steps, and a warning if it is too small."""
    from finetuning.data.batching import steps_per_round  # slow, since it imports PyTorch

    names: dict[int, list[str]] = {}
    for name, count in rows.items():
        names.setdefault(steps_per_round(count, config.train), []).append(name)
    size = config.train.batch_size * config.train.accumulation
    lines = [
        f"{', '.join(some[:3])}{f' and {len(some) - 3} more' * bool(some[3:])}: {steps} steps per "
        f"round of up to {size} rows, {steps * config.rounds} in all"
        for steps, some in sorted(names.items(), reverse=True)
    ]
    fewest, rate = min(names) * config.rounds, config.train.learning_rate
    if fewest * rate < _ENOUGH:
        lines.append(
            f"warning: {fewest} steps at train.learning-rate = {rate:g} hardly change a model; "
            "increase the rate, train.epochs or rounds, or lower train.accumulation "
            "(docs/own-data.md)"
        )
    return lines
