"""Helpers for Markdown documents."""

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, followed by an empty line."""
    first, *others = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return [first, "|" + "---|" * len(headings), *others, ""]
