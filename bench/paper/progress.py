"""How long the measurements that are missing will take, by those that are there."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.paper.cells import Cell, Record, described
from bench.paper.measuring import needs_quiet


def seconds_left(missing: Sequence[Cell], records: Sequence[Record], processes: int) -> float:
    """Estimate how long it takes to measure cells, each as long as similar ones took.

    Args:
        missing: The cells.
        records: What has been measured; at least one.
        processes: Number of cells measured at the same time.

    """
    known: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        for key in _keys(record["cell"]):
            known.setdefault(key, []).append(record["seconds"])
    total = 0.0
    for cell in missing:
        key = next(key for key in _keys(described(cell)) if key in known)
        total += statistics.mean(known[key]) / (1 if needs_quiet(cell) else processes)
    return total


def _keys(cell: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return what cells of similar duration have in common, the most similar ones first."""
    method = cell.get("method")
    return [(cell["kind"], cell.get("task"), method), (cell["kind"], method), (cell["kind"],), ()]
