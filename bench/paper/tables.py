"""Tables of own results with the papers' figures beside them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Value:
    """One entry of a table.

    Attributes:
        own: Own results, one per seed; empty if it was not run.
        published: The paper's figure; None if it has none.
        reason: Why it was not run, where it can't be.

    """

    own: Sequence[float] = ()
    published: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        title: Its title.
        columns: Headings, first those of the labels of rows.
        rows: Labels and values of each row.
        notes: Sentences below it.

    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Sequence[Value]]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """What an artefact consists of.

    Attributes:
        tables: Its tables.
        figures: SVG by name, without suffix.
        text: Further Markdown, such as answers side by side.

    """

    tables: Sequence[Table] = ()
    figures: dict[str, str] = field(default_factory=dict)
    text: str = ""


def write_document(file: Path, document: Document) -> None:
    """Write a document's tables as Markdown and CSV, and its figures.

    Args:
        file: Where, without suffix.
        document: The document.

    """
    raise NotImplementedError
