"""Losses and bytes with ranks 4, 8 and 16 for three clients, beside equal ranks and zero-padding.

    python -m bench.ranks [--rounds 5] [--model smollm2]

Each way trains on the demonstration's rows (``presets/demo.toml``), without generated answers. With
zero-padding, smaller adapters are filled with zeros, and A and B are averaged apart.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from bench.harness import command, make_table, show
from chambers.in_process import run_in_process
from chambers.settings import read_settings
from federation.run_folder import METRICS_FILE, read_events
from finetuning.adapters.adapter import State
from finetuning.aggregation.mixed_ranks import average_ranks, pad
from finetuning.aggregation.weighted_mean import WeightedMean

_PRESET = Path(__file__).resolve().parents[1] / "presets" / "demo.toml"
_WAYS: dict[str, dict[str, Any]] = {
    "4, 8 and 16, SVD of the product": {"adapter.ranks": "4,8,16"},
    "4, 8 and 16, zero-padding": {"adapter.ranks": "4,8,16"},
    "all 4": {"adapter.ranks": "4"},
    "all 16": {"adapter.ranks": "16"},
}


def zero_padded(
    tensors: Iterable[tuple[str, State]], weights: Mapping[str, float], previous: State
) -> State:
    """Return the average of zero-padded factors, in place of ``average_ranks``."""
    mean = WeightedMean()
    by_client: dict[str, State] = {}
    for name, values in tensors:
        for client, value in values.items():
            by_client.setdefault(client, {})[name] = value
    rank = min(next(iter(previous.values())).shape)
    for client, state in by_client.items():
        mean.add(pad(state, rank), weights[client])
    return mean.result()


def train(values: Mapping[str, Any], way: str) -> list[str]:
    """Train in one way; return the row of the table."""
    average = zero_padded if "zero" in way else average_ranks
    with TemporaryDirectory() as folder:
        own = {**values, **_WAYS[way], "output-dir": folder, "state-path": f"{folder}/state"}
        with patch("strategies.averaging.average_ranks", average):
            run_in_process(own, clients=3)
        (run,) = Path(folder).glob("20*")
        events = [e for e in read_events(run / METRICS_FILE) if e["event"] == "evaluate"]
        last = [e for e in events if e["round"] == max(e["round"] for e in events)]
        weights = [len(file.read_bytes()) for file in Path(folder, "state").rglob("adapter.saf*")]
    losses = [
        f"{fmean(e['loss'] for e in last if e['model'] == model):.3f}"
        for model in ("global", "personalised")
    ]
    return [way, *losses, f"{sum(weights) / len(weights) / 2**20:.2f}"]


def main() -> None:
    """Print a table."""
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    arguments = parser.parse_args()
    values: dict[str, Any] = dict(read_settings([str(_PRESET)]))
    values |= {"rounds": arguments.rounds, "model.name": arguments.model, "min-nodes": 3}
    values |= {"evaluate.every": arguments.rounds, "evaluate.generate": False}
    values |= {"evaluate.alone": False, "evaluate.show-answers": 0}
    values |= {"train.optimizer-state": "reset", "adapter.rank": 16, "adapter.alpha": 32}
    table = make_table("", "loss of the global model", "of personalised models", "MiB sent")
    for way in _WAYS:
        table.add_row(*train(values, way))
    show(json.dumps({key: values[key] for key in ("model.name", "rounds")}), table)


if __name__ == "__main__":
    main()
