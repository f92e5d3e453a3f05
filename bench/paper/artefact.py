"""A table or figure of a paper, with its cells and what is made of their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.paper.cells import Cell, Results
from bench.paper.sizes import Size
from bench.paper.tables import Document


@dataclass(frozen=True)
class Artefact:
    """A table or figure of a paper.

    Attributes:
        name: Its name on the command line.
        title: What it shows.
        cells: Returns its cells at a size; none if it can't be run at this size.
        document: Makes its tables and figures of what has been recorded.

    """

    name: str
    title: str
    cells: Callable[[Size], Sequence[Cell]]
    document: Callable[[Size, Results], Document]
