"""Parts of documents in Markdown."""

from collections.abc import Iterable, Sequence


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with an empty one after it."""
    first, *others = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return [first, "|" + "---|" * len(headings), *others, ""]
