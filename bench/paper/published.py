"""The values that both papers print, from ``published.toml``."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

_FILE = Path(__file__).with_name("published.toml")


@dataclass(frozen=True)
class Published:
    """A table of a paper.

    Attributes:
        source: Paper, section and number of the table.
        columns: Its columns.
        rows: The values of each row as they are printed, in the order of the columns; None where
            there is none.
        note: What is to be known about them; may be empty.

    """

    source: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[Decimal | None, ...]]
    note: str

    def figure(self, row: str, column: str) -> Decimal | None:
        """Return a figure, or None if the paper has none there.

        Raises:
            KeyError: The table has no such row or column.

        """
        if column not in self.columns:
            raise KeyError(column)
        return self.rows[row][self.columns.index(column)]


@functools.cache
def published(name: str) -> Published:
    """Return a table by its name on the command line, such as ``fl-glm-table1``.

    Raises:
        KeyError: The papers print no values of that name.

    """
    # 59.10 stays 59.10.
    table = tomllib.loads(_FILE.read_text(encoding="utf-8"), parse_float=Decimal)[name]
    columns = tuple(table["columns"])
    rows = {
        row: tuple(_figure(value) for _, value in zip(columns, values, strict=True))
        for row, values in table["rows"].items()
    }
    return Published(table["source"], columns, rows, table.get("note", ""))


def _figure(value: Decimal | int) -> Decimal | None:
    figure = Decimal(value)
    return None if figure.is_nan() else figure
