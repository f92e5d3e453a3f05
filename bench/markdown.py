"""Parts of documents in Markdown."""

import re
from collections.abc import Iterable, Sequence
from html import escape


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table, with an empty one after it."""
    first, *others = (f"| {' | '.join(line)} |" for line in (headings, *rows))
    return [first, "|" + "---|" * len(headings), *others, ""]


def escaped(text: str) -> str:
    """Escape what Markdown or HTML would not show as it is."""
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", escape(text, quote=False))


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters, with a mark where it was cut."""
    return text if len(text) <= most else text[:most] + "…"
