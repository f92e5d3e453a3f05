"""Read the answers of several models to the same questions."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from chambers.errors import CommandError
from finetuning.data.formats import DataError
from finetuning.data.layouts import check_characters, parse_messages
from finetuning.data.prompts import parse_prompt
from finetuning.data.rows import parse_rows

_SHOWN = 3


@dataclass(frozen=True)
class SheetQuestion:
    """A question with the answers of one or all models."""

    name: str  # the row's id, or the question itself
    text: str
    reference: str  # the expected answer; empty if there is none
    answers: Mapping[str, str]  # keyed by model, or by id in a sheet
    origin: str  # file and line


def read_answers(files: Mapping[str, Path]) -> list[SheetQuestion]:
    """Read questions with each model's answers, in the order of the first model's file.

    ``files`` contains a JSON Lines file for each model. A row has the keys ``question``, ``answer``
    and optionally ``reference`` and ``id``, or those that ``chambers generate --output`` writes.
    Rows of different files are matched by id or, without ids, by question. Raise ``UserError``,
    which names the file and the line, if a file can't be read, a row is malformed, or files have
    different questions.
    """
    by_model = {model: _read(file, model) for model, file in files.items()}
    first_model, first = next(iter(by_model.items()))
    for model, own in by_model.items():
        for one, other in ((first_model, model), (model, first_model)):
            absent = [q.origin for key, q in by_model[one].items() if key not in by_model[other]]
            if absent:
                shown = ", ".join(absent[:_SHOWN]) + (" and others" if absent[_SHOWN:] else "")
                raise CommandError(
                    f"{other} has no answer to the question in {shown} ({one}); all models must "
                    "answer the same questions"
                )
        for key, question in own.items():
            for what in ("text", "reference"):
                if getattr(question, what) != getattr(first[key], what):
                    different = "question" if what == "text" else what
                    raise CommandError(
                        f"{question.origin} has a different {different} from {first[key].origin}"
                    )
    return [
        replace(question, answers={m: own[key].answers[m] for m, own in by_model.items()})
        for key, question in first.items()
    ]


def _read(file: Path, model: str) -> dict[str, SheetQuestion]:
    """Return the questions with the answers of one model, keyed by name."""
    questions: dict[str, SheetQuestion] = {}
    for question in parse_rows(file, partial(_parse, model), advice="fix them"):
        if question.name in questions:
            raise CommandError(
                f"{question.origin} has the same question as {questions[question.name].origin}; "
                'give each row a different "id" if that is intended'
            )
        questions[question.name] = question
    return questions


def _parse(model: str, origin: str, value: Any) -> SheetQuestion:
    """Convert a row of either format; raise ``DataError`` with the reason if it is malformed."""
    if not isinstance(value, dict):
        raise DataError(f"expected an object, found {type(value).__name__}")
    if "generated" in value:
        question, reference = _of_generated(value)
        answer = value["generated"]
    else:
        if missing := [key for key in ("question", "answer") if key not in value]:
            raise DataError(f"has no {missing[0]!r}")
        question, answer = value["question"], value["answer"]
        reference = value.get("reference") or ""
    for name, text in {"question": question, "answer": answer, "reference": reference}.items():
        if not isinstance(text, str):
            raise DataError(f"the {name} must be text, found {type(text).__name__}")
        check_characters(f"the {name}", text)
    if not question.strip():
        raise DataError("the question is empty")
    name = str(value.get("id", question))
    return SheetQuestion(name, question, reference, {model: answer}, origin)


def _of_generated(value: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the question and the reference of a row written by ``chambers generate``."""
    *turns, _ = parse_prompt(value)
    # The last turn is the question, and earlier turns are its context.
    question = "\n\n".join(
        turn["content"] if turn is turns[-1] else f"{turn['role']}: {turn['content']}"
        for turn in turns
    )
    try:
        *_, last = parse_messages(value)
    except DataError:
        return question, value.get("output") or ""
    return question, last["content"] if last["role"] == "assistant" else ""
