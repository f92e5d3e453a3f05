"""Which cells FedJudge's tables and figures have at a size."""

from dataclasses import replace
from typing import get_args

from bench.paper.cells import LegalCell, LegalMethod
from bench.paper.sizes import Size


def cells_of(size: Size, method: LegalMethod) -> list[LegalCell]:
    """Return a method's cells, one for each seed; the bare model has no seed."""
    cell = LegalCell(size.models.legal, method)
    return [replace(cell, seed=seed) for seed in range(1 if method == "bare" else size.seeds)]


def all_cells(size: Size) -> list[LegalCell]:
    """Return the cells of tables 2 and 3."""
    return [cell for method in get_args(LegalMethod) for cell in cells_of(size, method)]


def cells_of_strategies(size: Size) -> list[LegalCell]:
    """Return the cells of figure 3."""
    return [*cells_of(size, "fedjudge-base"), *cells_of(size, "fedjudge-cl")]


def cells_of_answers(size: Size) -> list[LegalCell]:
    """Return the cells of figures 4 and 5."""
    return [cells_of(size, method)[0] for method in ("bare", "center", "fedjudge-cl")]
