"""The recorded values of an experiment, and the numbers of its tables and plots."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from chambers.experiment.measuring import BASE, Record
from chambers.experiment.plan import Experiment, Measure
from chambers.experiment.statistics import BySeed, Interval, difference, interval

FILE = "results.jsonl"
ALL = "all"
# (arm, model): values by (seed, group).
_Values = dict[tuple[str, str], dict[tuple[int, str], NDArray[np.float64]]]


def write_results(file: Path, about: Mapping[str, object], records: Iterable[Record]) -> None:
    """Write a line about the experiment, and one for each record."""
    lines = [json.dumps(about), *(json.dumps(asdict(record)) for record in records)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_results(file: Path) -> list[Record]:
    """Read what ``write_results`` has written."""
    _, *lines = file.read_text(encoding="utf-8").splitlines()
    return [Record(**json.loads(line)) for line in lines]


@dataclass(frozen=True)
class Row:
    """A model in a table.

    Attributes:
        label: Its name.
        arm: Its arm.
        cells: The interval of each group, and of all (``all``), by name.
        gain: The difference to the arm that it is compared with, over all questions.

    """

    label: str
    arm: str
    cells: Mapping[str, Interval]
    gain: Interval | None = None


def rows_of(
    records: Sequence[Record],
    experiment: Experiment,
    measure: Measure,
    arms: Sequence[str],
    against: str | None = None,
) -> list[Row]:
    """Return the rows of a table: one for each model of the arms, in their order.

    Models of an arm with a run for each client are compared as their mean, question by question.
    """
    values = _values(records, measure)
    compared = _mean_of(values, against) if against else None
    rows = []
    for arm in arms:
        for name, model in ((n, m) for (a, n), m in values.items() if a == arm):
            label = experiment.arms[arm].label
            if name not in {BASE, "global"}:
                label += f", {name}"
            gain = None
            if compared is not None and arm != against:
                gain = difference(_by_seed(model), _by_seed(compared))
            rows.append(Row(label, arm, _cells(model), gain))
    return rows


def _values(records: Sequence[Record], measure: Measure) -> _Values:
    values: _Values = {}
    for record in records:
        if record.measure == measure:
            of_model = values.setdefault((record.arm, record.model), {})
            of_model[record.seed, record.group] = np.array(record.values)
    return values


def _mean_of(values: _Values, arm: str) -> dict[tuple[int, str], NDArray[np.float64]]:
    models = [model for (name, _), model in values.items() if name == arm]
    return {key: np.mean([model[key] for model in models], axis=0) for key in models[0]}


def _by_seed(
    model: Mapping[tuple[int, str], NDArray[np.float64]], group: str | None = None
) -> BySeed:
    seeds = sorted({seed for seed, _ in model})
    return [
        np.concatenate(
            [v for (s, g), v in sorted(model.items()) if s == seed and group in (None, g)]
        )
        for seed in seeds
    ]


def _cells(model: Mapping[tuple[int, str], NDArray[np.float64]]) -> dict[str, Interval]:
    groups = sorted({group for _, group in model})
    cells = {group: interval(_by_seed(model, group)) for group in groups}
    return cells | {ALL: interval(_by_seed(model))}
