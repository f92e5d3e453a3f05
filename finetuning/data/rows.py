"""Read private rows, and report all malformed rows before training starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from finetuning.data.formats import FORMATS, DataError, read_values

_ROLES = ("system", "user", "assistant")
_SHOWN_PROBLEMS = 20

Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Row:
    """A conversation: turns with the keys ``role`` (system, user, assistant) and ``content``."""

    messages: tuple[dict[str, str], ...]
    origin: str  # file and line (or row number) that the row was read from
    fields: dict[str, Any]  # the unconverted row, for partitioning by one of its columns


def read_rows(path: Path | str, skip_bad: bool = False) -> list[Row]:
    """Read conversations; see `parse_rows` for paths, malformed rows and errors."""
    return parse_rows(path, lambda o, v: Row(parse_messages(v), o, v), skip_bad)


def parse_rows(
    path: Path | str,
    parse: Callable[[str, Any], Parsed],
    skip_bad: bool = False,
    advice: str = "fix them, or set data.skip-bad-rows=true to leave them out",
) -> list[Parsed]:
    """Read rows from a file or a Hugging Face data set.

    Args:
        path: A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or the id of a data set, whose
            split ``train`` is read.
        parse: Converts an origin and a value to a row, or raises a `DataError` with the reason.
        skip_bad: Omit malformed rows with a warning, instead of raising.
        advice: Remedy for malformed rows in the error message.

    Raise ``DataError`` if the data is missing or empty, or rows are malformed; the message names
    file, line and reason.
    """
    rows: list[Parsed] = []
    problems: list[str] = []
    for origin, value in read_values(path):
        try:
            if isinstance(value, DataError):
                raise value
            rows.append(parse(origin, value))
        except DataError as error:
            problems.append(f"{origin}: {error}")
    if problems and not skip_bad:
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"… and {len(problems) - len(shown)} more")
        raise DataError(
            f"{len(problems)} of {len(problems) + len(rows)} rows are malformed ({advice}):\n  "
            + "\n  ".join(shown)
        )
    for problem in problems:
        print(f"left out: {problem}", flush=True)
    if not rows:
        raise DataError(f"no rows in {path}")
    return rows


def find_part(folder: Path, part: str) -> Path | None:
    """Return ``folder/part.<format>`` if it exists; raise a DataError if there are several."""
    found = [file for suffix in FORMATS if (file := folder / f"{part}{suffix}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} has {' and '.join(file.name for file in found)}; keep one")
    return found[0] if found else None


def client_folders(path: Path) -> list[Path]:
    """Return the subfolders that contain training rows, sorted by name."""
    return sorted(f for f in path.glob("*") if f.is_dir() and find_part(f, "train"))


def find_parts(path: Path, held_out: str) -> tuple[Path, Path | None]:
    """Return the file of training rows, and the file of held-out rows or None if there is none.

    ``path`` is a folder with ``train.<format>`` and optionally a held-out part, or a file of
    training rows. Raise a DataError if there is no such file, or a part has several files.
    """
    if path.is_file():
        return path, None
    if not path.is_dir():
        raise DataError(f"{path} doesn't exist")
    train, test = find_part(path, "train"), find_part(path, held_out)
    if train is None:
        raise DataError(f"{path} has no train.jsonl (nor .json, .csv or .parquet)")
    return train, test


def parse_messages(value: Any) -> tuple[dict[str, str], ...]:
    """Convert a row to a conversation.

    A row is ``{"messages": [{"role", "content"}, …]}``, or ``{"instruction", "output"}`` with an
    optional ``input``. Raise a DataError with the reason if the value is not such a row.
    """
    if not isinstance(value, dict):
        raise DataError(f"expected an object, found {type(value).__name__}")
    # In CSV and Parquet files, this cell is empty for rows of the other form.
    if value.get("messages") not in (None, ""):
        return _check_turns(value["messages"])
    missing = [key for key in ("instruction", "output") if value.get(key) is None]
    if missing:
        raise DataError(f"has neither 'messages' nor {' and '.join(map(repr, missing))}")
    texts = {key: value.get(key) or "" for key in ("instruction", "input", "output")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{key!r} must be text, found {type(text).__name__}")
        check_characters(repr(key), text)
    if not texts["output"].strip():
        raise DataError("'output' is empty")
    question = "\n".join(text for text in (texts["instruction"], texts["input"]) if text.strip())
    if not question:
        raise DataError("'instruction' and 'input' are both empty")
    return question_and_answer(question, texts["output"])


def question_and_answer(question: str, answer: str) -> tuple[dict[str, str], ...]:
    """Return a conversation of one question and its answer."""
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def _check_turns(turns: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise DataError("'messages' must be a list of turns")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            raise DataError(f"turn {number} of 'messages' needs the role system, user or assistant")
        if not isinstance(turn.get("content"), str):
            raise DataError(f"turn {number} of 'messages' needs text as 'content'")
        check_characters(f"turn {number} of 'messages'", turn["content"])
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise DataError(f"turn {number} of 'messages' is an empty answer")
    if all(turn["role"] != "assistant" for turn in turns):
        raise DataError("'messages' has no assistant turn to learn from")
    if turns[0]["role"] == "assistant":
        raise DataError("'messages' starts with an assistant turn; a user turn must precede it")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)


def check_characters(name: str, text: str) -> None:
    """Raise a `DataError` if a text contains a lone surrogate, which no tokenizer accepts."""
    # JSON can contain half of a surrogate pair (\ud83d).
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} has a lone surrogate at character {error.start + 1}") from None
