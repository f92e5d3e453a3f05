"""Blinded sheets for annotators, and the key that maps each answer to its model."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

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
_VERSION = 1


@dataclass(frozen=True)
class Sheet:
    """The sheet of an annotator: all questions in random order.

    A question's answers are in random order, too, and keyed by random ids; see ``Key``.
    """

    annotator: int
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class KeyRow:
    """The annotator, the question and the model that an id stands for."""

    annotator: int
    number: int  # position of the question in the annotator's sheet
    question: str
    model: str


@dataclass(frozen=True)
class Key:
    """The key of all sheets: the seed of the random orders and ids, and what each id stands for."""

    seed: int
    models: tuple[str, ...]
    rows: Mapping[str, KeyRow]

    def to_json(self) -> str:
        """Return the content of the key file."""
        return json.dumps({"version": _VERSION} | asdict(self), ensure_ascii=False, indent=1)


def blind(
    questions: Sequence[Question], models: Sequence[str], annotators: int, seed: int
) -> tuple[list[Sheet], Key]:
    """Create a sheet for each annotator, and the key.

    Each sheet has a separate random order of questions and answers, and separate ids. Keep the seed
    secret, since it reveals the models.
    """
    sheets: list[Sheet] = []
    rows: dict[str, KeyRow] = {}
    for annotator in range(1, annotators + 1):
        draw = random.Random(f"{seed} {annotator}")
        own: list[Question] = []
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
        sheets.append(Sheet(annotator, tuple(own)))
    return sheets, Key(seed, tuple(models), rows)


def read_key(file: Path) -> Key:
    """Read a key; raise ``CommandError`` if the file isn't one."""
    try:
        content = json.loads(read_bytes(file))
        if content["version"] != _VERSION:
            raise ValueError(f"its version is {content['version']}, not {_VERSION}")
        rows = {name: KeyRow(**row) for name, row in content["rows"].items()}
        return Key(content["seed"], tuple(content["models"]), rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"{file} is not a key from chambers sheet make: {error}") from error
