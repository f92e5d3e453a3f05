"""A question of a task, and functions that read the fields of a row.

The functions raise a `DataError` if a field is missing or has the wrong type or value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetuning.data.formats import DataError
from finetuning.data.layouts import check_characters


@dataclass(frozen=True)
class Question:
    """A question with its right answers."""

    origin: str  # source file and line; questions of one line share most of their prompt
    prompt: str  # text of the question
    answers: tuple[str, ...]  # right answers, each sufficient; empty if no candidate is right
    candidates: tuple[str, ...] = ()  # answers to choose from; empty if the answer is generated
    group: str = ""  # key of questions from one question of MultiRC, or about one text of WSC


def as_object(value: Any, name: str = "a row") -> Mapping[str, Any]:
    """Return a JSON value that must be an object; ``name`` describes the value in the error."""
    if not isinstance(value, dict):
        raise DataError(f"{name} must be an object, found {type(value).__name__}")
    return value


def text_of(row: Mapping[str, Any], key: str) -> str:
    """Return a text field, which must not be empty, without surrounding whitespace."""
    value = row.get(key)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"needs text in {key!r}")
    check_characters(repr(key), value)
    return value.strip()


def list_of(row: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    """Return a field that must be a non-empty list of objects."""
    value = row.get(key)
    if not isinstance(value, list) or not value:
        raise DataError(f"needs a list in {key!r}")
    return [as_object(each, f"each of {key!r}") for each in value]


def number_of(row: Mapping[str, Any], key: str) -> int:
    """Return a field that must be an integer of at least 0."""
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise DataError(f"needs a whole number in {key!r}")
    return value


def label_of(row: Mapping[str, Any], names: Mapping[Any, str]) -> str:
    """Return the answer that a row's label stands for.

    ``names`` maps labels, in the order of their numbers on the Hugging Face Hub, to answers. A
    label may also be such a number and, as in CSV, text.
    """
    label = row.get("label")
    if label is None or label == -1:  # -1 on the Hub
        raise DataError("has no 'label' (SuperGLUE's test parts are published without labels)")
    text = str(label).strip().lower()
    if isinstance(label, str | bool):
        for known, name in names.items():
            if text == str(known).lower():
                return name
    if not isinstance(label, bool) and text.isdecimal() and int(text) < len(names):
        return [*names.values()][int(text)]
    raise DataError(f"'label' must be {' or '.join(map(repr, names))}")
