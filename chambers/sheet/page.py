"""Convert a sheet to an HTML page that works offline, or to a CSV table for spreadsheets."""

import base64
import csv
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from chambers.sheet.answers import Question
from chambers.sheet.blinding import CRITERIA, HIGHEST, LOWEST

# Spreadsheets evaluate cells that begin with these characters as formulas.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")

# A Jinja template.
_SOURCE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_SCRIPT = _SOURCE.partition("<script>")[2].partition("</script>")[0]
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_SOURCE)


def to_page(annotator: int, questions: Sequence[Question]) -> str:
    """Return a sheet as a self-contained HTML page, which saves the chosen scores as CSV."""
    return _PAGE.render(
        annotator=annotator,
        questions=questions,
        criteria=CRITERIA,
        scores=range(LOWEST, HIGHEST + 1),
        count=sum(len(question.answers) for question in questions),
        digest=base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode(),
    )


def to_table(questions: Sequence[Question]) -> str:
    """Return a sheet as CSV with empty cells for scores."""
    text = io.StringIO()
    table: Any = csv.writer(text)
    table.writerow(["id", "number", "question", "reference", "answer", *CRITERIA])
    for number, question in enumerate(questions, start=1):
        given = [_plain(question.text), _plain(question.reference)]
        for name, answer in question.answers.items():
            cells = [name, number, *given, _plain(answer)]
            table.writerow([*cells, *("" for _ in CRITERIA)])
    return text.getvalue()


def _plain(text: str) -> str:
    """Escape a cell that spreadsheets would evaluate as a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text
