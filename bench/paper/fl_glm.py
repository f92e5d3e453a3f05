"""The tables and figures of FL-GLM: their cells, and rows made of results."""

from bench.paper.artefact import Artefact
from bench.paper.cells import Method, TaskCell
from bench.paper.sizes import Size

SCHEDULES: tuple[Method, ...] = ("serial", "client-batch", "hierarchical")
ARTEFACTS: tuple[Artefact, ...] = ()


def seeds(size: Size, cell: TaskCell) -> list[TaskCell]:
    """Return a cell with every seed."""
    from dataclasses import replace

    return [replace(cell, seed=seed) for seed in range(size.seeds)]
