"""The values that an experiment records, and the numbers of its tables and plots."""

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from chambers.experiment.plan import (
    ALL,
    CONSTANT,
    OTHERS,
    OWN,
    Experiment,
    Measure,
    ResultTable,
    of_variant,
)
from chambers.intervals import BySeed, Interval, are_equal, interval
from finetuning.files import write_file

GLOBAL, BASE = "global", "base"
_CLIENTS = "clients"
RESERVED = {GLOBAL, BASE, _CLIENTS, ALL}  # no client has one of these names
# Measures that aren't shares, with their units.
UNITS: Mapping[Measure, str] = {
    "loss": "nats per token",
    "distance": "the Euclidean norm of adapter weights",
    "exposure-1": "bits",
    "exposure-4": "bits",
    "exposure-16": "bits",
}
# One value per question, keyed by seed and group.
_Values = dict[tuple[int, str], NDArray[np.float64]]
_Name = tuple[str, str]  # an arm, and a model or a kind of models


@dataclass(frozen=True)
class Record:
    """The values of one model on one group of questions."""

    arm: str  # ``constant`` for the best single answer to all questions
    model: str  # ``base``, ``global``, or the client whose model it is
    seed: int
    group: str
    measure: Measure
    values: list[float]  # one value per question, or a single value that the client reported


def write_records(file: Path, about: Mapping[str, object], records: Iterable[Record]) -> None:
    """Write a line that says what the records are about, and a line for each record."""
    lines = [json.dumps(about), *(json.dumps(asdict(record)) for record in records)]
    write_file(file, "\n".join(lines) + "\n")


def read_records(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return what the records in a file are about, and the records."""
    about, *records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return about, [Record(**record) for record in records]


@dataclass(frozen=True)
class TableRow:
    """A table's row: a model, or all models of a kind. Intervals are keyed by column heading."""

    label: str
    arm: str
    client: str | None  # client to which the model belongs, if any
    cells: Mapping[str, Interval]
    gains: Mapping[str, Interval]  # differences from the arm ``against``
    # Whether each difference is shown to be less than its margin, if it has one.
    equal: Mapping[str, bool]


def rows_of(
    records: Sequence[Record], experiment: Experiment, table: ResultTable
) -> list[TableRow]:
    """Return the rows of a table, with the arms in the table's order.

    Each arm is compared with the arm ``against``, question by question, within each variant of the
    settings: no column mixes variants. For columns ``own``, models are compared with that arm's
    models of the same kind or, if it has none, of its first kind. For columns ``groups``, each
    model is compared with that arm's global model or, if it has none, with the mean of its models.
    The models of clients without questions of their own are one row.
    """
    models, shared = _models(records, table.measure), experiment.shares_questions
    variants = experiment.variants
    arms = [CONSTANT, *table.arms]
    named = {name: model for name, model in models.items() if name[0] in arms}
    if table.columns == "own":
        lines = {
            name: _own_and_others(of_kind, variants) for name, of_kind in _kinds(named).items()
        }
        compared = {kind: line for (arm, kind), line in lines.items() if arm == table.against}
    else:
        groups = {group for model in named.values() for _, group in model}
        lines = {
            name: _groups(_mean([*of_kind.values()]), variants)
            for name, of_kind in _kinds(named, apart=groups).items()
        }
        against = {kind: model for (arm, kind), model in models.items() if arm == table.against}
        chosen = [against[GLOBAL]] if GLOBAL in against else [*against.values()]
        compared = {GLOBAL: _wholes(_mean(chosen), variants)}
    highest = math.inf if table.measure in UNITS else 1.0
    rows = []

    for (arm, kind), line in sorted(lines.items(), key=lambda item: arms.index(item[0][0])):
        other = compared.get(kind) or next(iter(compared.values()), {})
        differences = {
            column: _by_seed({key: line[column][key] - own for key, own in values.items()})
            for column, values in other.items()
            if arm not in {table.against, CONSTANT}
            and line.get(column, {}).keys() == values.keys()  # the same clients
        }
        cells = {c: interval(_by_seed(v), shared, 0.0, highest) for c, v in line.items()}
        gains = {c: interval(v, shared, -highest, highest) for c, v in differences.items()}
        equal = {
            column: are_equal(differences[column], margin, shared)
            for column, margin in table.equal.items()
            if column in differences
        }
        client = None if kind in {BASE, GLOBAL, _CLIENTS} else kind
        label = _label(experiment, arm, kind, lines)
        rows.append(TableRow(label, arm, client, cells, gains, equal))
    return rows


def _label(experiment: Experiment, arm: str, kind: str, lines: Collection[_Name]) -> str:
    if arm == CONSTANT:
        return "the same answer"
    label = experiment.arms[arm].label
    if kind in {BASE, GLOBAL} or (kind == _CLIENTS and (arm, GLOBAL) not in lines):
        return label
    return f"{label}, {'personalised' if kind == _CLIENTS else kind}"


def _models(records: Sequence[Record], measure: Measure) -> dict[_Name, _Values]:
    models: dict[_Name, _Values] = defaultdict(dict)
    for record in records:
        if record.measure == measure:
            models[record.arm, record.model][record.seed, record.group] = np.array(record.values)
    return models


def _kinds(
    models: Mapping[_Name, _Values], apart: Collection[str] = ()
) -> dict[_Name, dict[str, _Values]]:
    """Return the models of each arm and kind (base, global or clients), keyed by name.

    Clients ``apart`` are kinds of their own.
    """
    kinds: dict[_Name, dict[str, _Values]] = defaultdict(dict)
    for (arm, name), model in models.items():
        kinds[arm, name if name in {BASE, GLOBAL, *apart} else _CLIENTS][name] = model
    return kinds


def _own_and_others(models: Mapping[str, _Values], variants: Collection[str]) -> dict[str, _Values]:
    """For each group, return the values of its client's model, and the other models' mean.

    A model that belongs to no client has the same values in both columns.
    """
    if not models.keys().isdisjoint({BASE, GLOBAL}):
        (own,) = models.values()
        others = own
    else:
        own = {key: models[key[1]][key] for model in models.values() for key in model}
        others = {
            key: _mean([m for name, m in models.items() if name != key[1] and key in m])[key]
            for key in own
        }
    return {
        of_variant(variant, column): {key: values[key] for key in keys}
        for variant, keys in _by_variant(own, variants).items()
        for column, values in ((OWN, own), (OTHERS, others))
    }


def _groups(model: _Values, variants: Collection[str]) -> dict[str, _Values]:
    """Return a model's values on each group, and on all groups of each variant together."""
    columns = {}
    for whole, values in _wholes(model, variants).items():
        names = list(dict.fromkeys(group for _, group in values))
        for name in names if len(names) > 1 else ():
            columns[name] = {k: v for k, v in values.items() if k[1] == name}
        columns[whole] = values
    return columns


def _wholes(model: _Values, variants: Collection[str]) -> dict[str, _Values]:
    """Return a model's values on all groups of each variant, by column."""
    return {
        variant if {group for _, group in own} == {variant} else of_variant(variant, ALL): own
        for variant, own in _by_variant(model, variants).items()
    }


def _by_variant(values: _Values, variants: Collection[str]) -> dict[str, _Values]:
    parts: dict[str, _Values] = defaultdict(dict)
    for (seed, group), value in values.items():
        own = [name for name in variants if not name or f"{group} ".startswith(f"{name} ")]
        parts[max(own, key=len, default="")][seed, group] = value
    return parts


def _mean(models: Sequence[_Values]) -> _Values:
    keys = dict.fromkeys(key for model in models for key in model)
    return {key: np.mean([m[key] for m in models if key in m], axis=0) for key in keys}


def _by_seed(values: _Values) -> BySeed:
    seeds = sorted({seed for seed, _ in values})
    return [
        np.concatenate([v for (s, _), v in sorted(values.items()) if s == seed]) for seed in seeds
    ]
