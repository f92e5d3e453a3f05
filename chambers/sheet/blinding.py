"""Blinded sheets for annotators, as pages and tables, and the key of models to answers."""

import base64
import csv
import hashlib
import io
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment
from pydantic import BaseModel, ValidationError

from chambers.errors import CommandError, first_problem, read_bytes
from chambers.sheet.answers import SheetQuestion

MIN_SCORE, MAX_SCORE = 1, 5
# Meaning of each score, from the lowest to the highest (FedJudge, table 4).
CRITERIA: Mapping[str, Sequence[str]] = {
    "usefulness": (
        "No use. The generated texts are useless for answering questions.",
        "Almost useless. Almost all generated texts are useless.",
        "Half of them are useful. About half of the generated texts are useful for answering "
        "questions.",
        "Highly useful. Most generated texts are useful to answer the questions.",
        "Exactly. Generated texts are useful for me to get the correct answer.",
    ),
    "fluency": ("Nonsense.", "Very unfluent.", "Partial fluent.", "Highly fluent.", "Very fluent."),
}
# Consonants only, so that spreadsheets don't convert ids to numbers, dates or formulas.
_LETTERS = "bcdfghjklmnpqrstvwxz"
_ID_LENGTH = 10
# Spreadsheets evaluate cells that begin with these characters as formulas.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
# A Jinja template.
_SOURCE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_SCRIPT = _SOURCE.partition("<script>")[2].partition("</script>")[0]
_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(_SOURCE)


class KeyRow(BaseModel):
    """The annotator, the question and the model that an id stands for."""

    annotator: int
    number: int  # position of the question in the annotator's sheet
    question: str
    model: str


class Key(BaseModel):
    """The key of all sheets: the seed of the random orders and ids, and what each id stands for."""

    version: Literal[1] = 1
    seed: int
    models: list[str]
    rows: dict[str, KeyRow]


def blind(
    questions: Sequence[SheetQuestion], models: Sequence[str], annotators: int, seed: int
) -> tuple[dict[int, list[SheetQuestion]], Key]:
    """Create a sheet for each annotator, keyed by the annotator's number, and the key.

    A sheet contains all questions. Each sheet has a separate random order of questions and answers,
    and separate random ids, by which the answers are keyed; see ``Key``. Keep the seed secret,
    since it reveals the models.
    """
    sheets: dict[int, list[SheetQuestion]] = {}
    rows: dict[str, KeyRow] = {}
    for annotator in range(1, annotators + 1):
        draw = random.Random(f"{seed} {annotator}")
        own = sheets[annotator] = []
        for number, question in enumerate(draw.sample(questions, len(questions)), start=1):
            answers: dict[str, str] = {}
            for model in draw.sample(models, len(models)):
                while (name := "".join(draw.choices(_LETTERS, k=_ID_LENGTH))) in rows:
                    pass
                rows[name] = KeyRow(
                    annotator=annotator, number=number, question=question.name, model=model
                )
                answers[name] = question.answers[model]
            own.append(replace(question, answers=answers))
    return sheets, Key(seed=seed, models=list(models), rows=rows)


def read_sheet_key(file: Path) -> Key:
    """Read a key; raise ``CommandError`` if the file isn't one."""
    try:
        return Key.model_validate_json(read_bytes(file))
    except ValidationError as error:
        problem = first_problem(error)
        raise CommandError(f"{file} is not a key from chambers sheet make: {problem}") from error


def to_page(annotator: int, questions: Sequence[SheetQuestion]) -> str:
    """Return a sheet as a self-contained HTML page, which saves the chosen scores as CSV."""
    return _PAGE.render(
        annotator=annotator,
        questions=questions,
        criteria=CRITERIA,
        scores=range(MIN_SCORE, MAX_SCORE + 1),
        count=sum(len(question.answers) for question in questions),
        digest=base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode(),
    )


def to_table(questions: Sequence[SheetQuestion]) -> str:
    """Return a sheet as CSV with empty cells for scores."""
    text = io.StringIO()
    table: Any = csv.writer(text)
    table.writerow(["id", "number", "question", "reference", "answer", *CRITERIA])
    for number, question in enumerate(questions, start=1):
        shared = [_plain(question.text), _plain(question.reference)]
        for name, answer in question.answers.items():
            cells = [name, number, *shared, _plain(answer)]
            table.writerow([*cells, *("" for _ in CRITERIA)])
    return text.getvalue()


def _plain(text: str) -> str:
    """Escape a cell that spreadsheets would evaluate as a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text
