"""Tables of own results with the papers' figures beside them, in Markdown and CSV."""

import csv
import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path

from bench.markdown import table
from finetuning.files import replacing

NOT_RUN = "Not run yet."


@dataclass(frozen=True)
class Value:
    """One entry of a table.

    Attributes:
        own: Own results, one per seed; empty if it was not run.
        published: The paper's figure; None if it has none.
        reason: Why it was not run, where it can't be.
        published_deviation: The standard deviation that the paper gives, if any.
        quoted: Whether it is a figure of the literature, which is not to be run.
        digits: Digits of own results after the decimal point; None for the table's.

    """

    own: Sequence[float] = ()
    published: Decimal | None = None
    reason: str = ""
    published_deviation: Decimal | None = None
    quoted: bool = False
    digits: int | None = None

    def text(self, digits: int) -> str:
        """Return the mean ± standard deviation, and the paper's figure in italics."""
        parts = []
        if self.own:
            digits = digits if self.digits is None else self.digits
            deviation = f" ± {statistics.stdev(self.own):.{digits}f}" if len(self.own) > 1 else ""
            parts.append(f"{statistics.mean(self.own):.{digits}f}{deviation}")
        elif not self.quoted:
            parts.append("not run")
        if self.published is not None:
            deviation = f" ± {self.published_deviation}" if self.published_deviation else ""
            parts.append(f"*{self.published}{deviation}*")
        return " · ".join(parts) or "–"


@dataclass(frozen=True)
class Table:
    """A table of a paper.

    Attributes:
        title: Its title.
        columns: Headings, first those of the labels of rows.
        rows: Labels and values of each row.
        notes: Sentences below it.
        digits: Digits of own results after the decimal point.

    """

    title: str
    columns: Sequence[str]
    rows: Sequence[tuple[Sequence[str], Sequence[Value]]]
    notes: Sequence[str] = ()
    digits: int = 1

    def markdown(self) -> str:
        """Return the table with its title and notes.

        If nothing of it was run, its rows are shown only if some quote figures of the literature,
        or if there is a reason.
        """
        values = [value for _, own in self.rows for value in own]
        quoted = any(value.quoted and value.published is not None for value in values)
        run = any(value.own for value in values if not value.quoted)
        lines = [f"**{self.title}**", ""]
        if run or quoted or any(value.reason for value in values):
            rows = (
                [*labels, *(value.text(self.digits) for value in own)] for labels, own in self.rows
            )
            lines += table(self.columns, rows)
            lines += [f"Not run: {reason}.\n" for reason in self._reasons()]
        else:
            lines += [NOT_RUN, ""]
        return "\n".join([*lines, *(f"{note}\n" for note in self.notes)])

    def csv(self) -> str:
        """Return a line for each figure."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        names = ("column", "mean", "standard deviation", "seeds", "paper", "paper's deviation")
        for labels, values in self.rows:
            if not file.tell():
                headings = (heading or "row" for heading in self.columns[: len(labels)])
                writer.writerow([*headings, *names, "note"])
            for column, value in zip(self.columns[len(labels) :], values, strict=True):
                own = value.own
                numbers = (
                    statistics.mean(own) if own else None,
                    statistics.stdev(own) if len(own) > 1 else None,
                    len(own),
                    value.published,
                    value.published_deviation,
                )
                note = "quoted" if value.quoted else "" if own else value.reason or "not run"
                writer.writerow([*labels, column, *numbers, note])
        return file.getvalue()

    def _reasons(self) -> list[str]:
        """Return each reason for figures that are missing, with the rows that it concerns."""
        found: dict[str, list[str]] = {}
        for labels, values in self.rows:
            for reason in {v.reason: None for v in values if v.reason and not v.own}:
                found.setdefault(reason, []).append(", ".join(filter(None, labels)))
        return [
            reason if len(rows) == len(self.rows) else f"{'; '.join(rows)}: {reason}"
            for reason, rows in found.items()
        ]


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

    def markdown(self, pictures: str = "") -> str:
        """Return tables, figures and text; ``pictures`` is the folder of the figures, with a /."""
        images = [f"![{name}]({pictures}{name}.svg)\n" for name in self.figures]
        parts = [*(each.markdown() for each in self.tables), *images, self.text]
        return "\n".join(filter(None, parts)) or f"{NOT_RUN}\n"


def write_document(file: Path, document: Document) -> None:
    """Write a document as Markdown, its tables as CSV, and its figures as SVG beside them.

    Args:
        file: Where, without suffix. Tables are numbered if there are several.
        document: The document.

    """
    write_text(file.with_name(f"{file.name}.md"), document.markdown())
    for number, each in enumerate(document.tables, start=1):
        suffix = f"-{number}" if len(document.tables) > 1 else ""
        write_text(file.with_name(f"{file.name}{suffix}.csv"), each.csv())
    for name, svg in document.figures.items():
        write_text(file.with_name(f"{name}.svg"), svg)


def write_text(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    with replacing(file) as aside:
        aside.write_text(text, encoding="utf-8")
