"""Blinded sheets for annotators, and the key that maps each answer to its model."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from chambers.errors import CommandError, read_bytes
from chambers.sheet.answers import Question

LOWEST, HIGHEST = 1, 5
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
    questions: Sequence[Question], models: Sequence[str], annotators: int, seed: int
) -> tuple[dict[int, list[Question]], Key]:
    """Create a sheet for each annotator, keyed by the annotator's number, and the key.

    A sheet contains all questions. Each sheet has a separate random order of questions and answers,
    and separate random ids, by which the answers are keyed; see ``Key``. Keep the seed secret,
    since it reveals the models.
    """
    sheets: dict[int, list[Question]] = {}
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


def read_key(file: Path) -> Key:
    """Read a key; raise ``CommandError`` if the file isn't one."""
    try:
        return Key.model_validate_json(read_bytes(file))
    except ValidationError as error:
        raise CommandError(f"{file} is not a key from chambers sheet make: {error}") from error
