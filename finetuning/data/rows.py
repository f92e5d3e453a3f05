"""Reading private rows: what is wrong with which row is said before anything is trained."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_ROLES = ("system", "user", "assistant")
_SHOWN_PROBLEMS = 20


class DataError(ValueError):
    """Data is missing or malformed; the message names files, lines and reasons."""


@dataclass(frozen=True)
class Row:
    """One conversation.

    Attributes:
        messages: turns with the keys ``role`` (system, user or assistant) and ``content``.
        origin: the file and the line (or row number) it came from.
        fields: the row as it was read, for partitioning by one of its columns.

    """

    messages: tuple[dict[str, str], ...]
    origin: str
    fields: dict[str, Any]


def read_rows(path: Path | str, part: str = "train", skip_bad: bool = False) -> list[Row]:
    """Read conversations from a file, or from a Hugging Face data set.

    Args:
        path: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, or a data set's id.
        part: the split to read where ``path`` has several.
        skip_bad: leave malformed rows out and warn, instead of raising.

    Raises:
        DataError: the data is missing or empty, or rows are malformed: file, line and reason.

    """
    rows: list[Row] = []
    problems: list[str] = []
    for origin, value in _values(path, part):
        try:
            if isinstance(value, DataError):
                raise value
            rows.append(Row(parse_messages(value), origin, value))
        except DataError as error:
            problems.append(f"{origin}: {error}")
    if problems and not skip_bad:
        shown = problems[:_SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"… and {len(problems) - len(shown)} more")
        raise DataError(
            f"{len(problems)} of {len(problems) + len(rows)} rows are malformed (mend them, or set "
            "data.skip-bad-rows=true to leave them out):\n  " + "\n  ".join(shown)
        )
    for problem in problems:
        print(f"left out: {problem}", flush=True)
    if not rows:
        raise DataError(f"no rows in {path}")
    return rows


def find_part(folder: Path, part: str) -> Path | None:
    """Give ``folder/part.<format>`` if there is one.

    Raises:
        DataError: there are several, so that it isn't clear which one is meant.

    """
    found = [folder / f"{part}{suffix}" for suffix in FORMATS]
    found = [file for file in found if file.is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} has {' and '.join(file.name for file in found)}; keep one")
    return found[0] if found else None


def parse_messages(value: Any) -> tuple[dict[str, str], ...]:
    """Turn a row of either form into a conversation.

    Args:
        value: ``{"messages": [{"role", "content"}, …]}``, or ``{"instruction", "output"}`` with
            an optional ``input``.

    Raises:
        DataError: the reason why it is not such a row.

    """
    if not isinstance(value, dict):
        raise DataError(f"expected an object, found {type(value).__name__}")
    if value.get("messages") is not None:
        return _check_turns(value["messages"])
    missing = [key for key in ("instruction", "output") if value.get(key) is None]
    if missing:
        raise DataError(f"has neither 'messages' nor {' and '.join(map(repr, missing))}")
    texts = {key: value.get(key) or "" for key in ("instruction", "input", "output")}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise DataError(f"{key!r} must be text, found {type(text).__name__}")
    if not texts["output"].strip():
        raise DataError("'output' is empty")
    question = "\n".join(text for text in (texts["instruction"], texts["input"]) if text.strip())
    if not question:
        raise DataError("'instruction' and 'input' are both empty")
    return (
        {"role": "user", "content": question},
        {"role": "assistant", "content": texts["output"]},
    )


def _check_turns(turns: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise DataError("'messages' must be a list of turns")
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or turn.get("role") not in _ROLES:
            raise DataError(f"turn {number} of 'messages' needs a role of {', '.join(_ROLES)}")
        if not isinstance(turn.get("content"), str):
            raise DataError(f"turn {number} of 'messages' needs 'content' that is text")
        if turn["role"] == "assistant" and not turn["content"].strip():
            raise DataError(f"turn {number} of 'messages' is an empty answer")
    if all(turn["role"] != "assistant" for turn in turns):
        raise DataError("'messages' has no assistant turn to learn from")
    if turns[0]["role"] == "assistant":
        raise DataError("'messages' starts with an answer to nothing")
    return tuple({"role": turn["role"], "content": turn["content"]} for turn in turns)


def _values(path: Path | str, part: str) -> Iterator[tuple[str, Any]]:
    """Yield origin and raw value of every row; a value that can't be read is a DataError."""
    if isinstance(path, Path):
        if not path.is_file():
            raise DataError(f"{path} is not a file")
        if path.suffix not in FORMATS:
            raise DataError(f"{path}: the format must be one of {', '.join(FORMATS)}")
        if path.suffix == ".jsonl":
            yield from _json_lines(path)
            return
    for number, value in enumerate(_stream(path, part), start=1):
        yield f"{path}, row {number}", value


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            value: Any
            try:
                value = json.loads(line)
            except UnicodeDecodeError as error:
                value = DataError(f"not UTF-8: {error.reason} at byte {error.start}")
            except json.JSONDecodeError as error:
                value = DataError(f"not JSON: {error.msg} at column {error.colno}")
            except RecursionError:
                value = DataError("not JSON that can be read: nested too deeply")
            yield f"{path}:{number}", value


def _stream(path: Path | str, part: str) -> Iterable[Any]:
    """Read by ``datasets``, streaming: that way no copy of private text is left in its cache."""
    from datasets import load_dataset

    try:
        if isinstance(path, Path):
            yield from load_dataset(
                FORMATS[path.suffix], data_files=str(path), split="train", streaming=True
            )
        else:
            yield from load_dataset(path, split=part, streaming=True)
    except Exception as error:  # whatever a reader of a foreign format raises
        raise DataError(f"{path} can't be read: {error}") from error
