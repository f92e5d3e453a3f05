"""Compare the tables of a page with longer ones that were made from recorded results."""

import re
from collections.abc import Iterator, Sequence

# A table's rows, each with its cells by heading.
Table = list[dict[str, str]]


def tables_in(text: str) -> list[Table]:
    """Return the tables in a Markdown text."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    return [list(_rows([_cells(line) for line in block.splitlines()])) for block in blocks]


def assert_selected(table: Table, made: Sequence[Table]) -> None:
    """Fail unless each row is part of a row of a made table, perhaps without intervals.

    A row may have empty cells under headings of other made tables.
    """
    rows = [row for each in made for row in each]
    for row in table:
        assert any(_is_part(row, other) for other in rows), row


def _is_part(row: dict[str, str], made: dict[str, str]) -> bool:
    def is_same(heading: str, cell: str) -> bool:
        full = made.get(heading, "")
        return cell in {full, re.sub(r" \(.*?\)", "", full)}

    return all(is_same(heading, cell) for heading, cell in row.items())


def _rows(lines: list[list[str]]) -> Iterator[dict[str, str]]:
    headings, _, *rows = lines
    for row in rows:
        yield dict(zip(headings, row, strict=True))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]
