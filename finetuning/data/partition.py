"""Divide a data set among simulated clients: IID, by length, by label, or by Dirichlet shares."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from finetuning.data.formats import DataError
from finetuning.data.rows import Row
from finetuning.randomness import derive_seed
from finetuning.settings import DataSettings

_DIRICHLET_DRAWS = 1000
_Integers = NDArray[np.int64]


def partition(
    rows: Sequence[Row], parts: int, settings: DataSettings, seed: int
) -> list[list[Row]]:
    """Divide rows into disjoint, non-empty parts that cover all of them.

    With "iid", rows of the same origin, such as several questions on one passage, stay together.
    The parts depend only on the arguments. Raise a DataError if there are too few rows or labels
    for the number of parts, a row has no label, or no draw of Dirichlet shares gives every part a
    row.
    """
    if len(rows) < parts:
        raise DataError(f"{len(rows)} rows can't be divided among {parts} clients")
    random = np.random.default_rng(derive_seed("partition", seed))
    if settings.partition == "iid":
        return _iid(rows, parts, random)
    order = random.permutation(len(rows))
    if settings.partition == "length":
        lengths = np.array([sum(len(turn["content"]) for turn in row.messages) for row in rows])
        groups = np.array_split(order[np.argsort(lengths[order], kind="stable")], parts)
    else:
        labels = _labels(rows, settings.partition_field)[order]
        if settings.partition == "label":
            groups = _by_label(order, labels, parts)
        else:
            groups = _by_dirichlet(
                order=order,
                labels=labels,
                parts=parts,
                alpha=settings.dirichlet_alpha,
                random=random,
            )
    return [[rows[index] for index in group] for group in groups]


def _iid(rows: Sequence[Row], parts: int, random: np.random.Generator) -> list[list[Row]]:
    by_origin: dict[str, list[Row]] = {}
    for row in rows:
        by_origin.setdefault(row.origin, []).append(row)
    if len(by_origin) < parts:
        raise DataError(f"there are only {len(by_origin)} rows for {parts} clients")
    together = list(by_origin.values())
    order = random.permutation(len(together))
    return [[row for n in order[part::parts] for row in together[n]] for part in range(parts)]


def _labels(rows: Sequence[Row], field: str) -> _Integers:
    """Return the number of each row's label; labels are numbered in alphabetical order."""
    labels = [row.fields.get(field, row.label if field == "label" else None) for row in rows]
    for row, label in zip(rows, labels, strict=True):
        if label in (None, ""):
            raise DataError(f"{row.origin}: no label in {field!r} (data.partition-field)")
    names = sorted({*map(str, labels)})
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[str(label)] for label in labels])


def _by_label(order: _Integers, labels: _Integers, parts: int) -> list[_Integers]:
    """Assign each label, most frequent first, to the client with the fewest rows so far."""
    counts = np.bincount(labels)
    if len(counts) < parts:
        raise DataError(f"{len(counts)} labels can't be divided among {parts} clients")
    owners = np.zeros(len(counts), dtype=int)
    sizes = np.zeros(parts, dtype=int)
    for label in np.argsort(-counts, kind="stable"):
        owners[label] = np.argmin(sizes)
        sizes[owners[label]] += counts[label]
    return [order[owners[labels] == part] for part in range(parts)]


def _by_dirichlet(
    order: _Integers, labels: _Integers, parts: int, alpha: float, random: np.random.Generator
) -> list[_Integers]:
    """Divide each label's rows by shares from Dirichlet(alpha); redraw until no part is empty."""
    for _ in range(_DIRICHLET_DRAWS):
        pieces = []
        for label in range(labels.max() + 1):
            own = order[labels == label]
            shares = random.dirichlet(np.full(parts, alpha))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(own)).astype(int)
            pieces.append(np.split(own, cuts))
        groups = [np.concatenate(group) for group in zip(*pieces, strict=True)]
        if all(len(group) for group in groups):
            return groups
    raise DataError(
        f"with data.dirichlet-alpha = {alpha}, each of {_DIRICHLET_DRAWS} draws left at least one "
        f"of {parts} clients without rows; raise data.dirichlet-alpha"
    )
