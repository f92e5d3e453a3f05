"""The rows that a task's cell trains on, and the questions that it scores."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.paper.sizes import TaskTraining
from finetuning.data.prompts import prompt_rows
from finetuning.data.rows import DataError, Row, parse_rows, refuse_malformed
from finetuning.data.tokenization import Example, tokenize
from finetuning.settings import DataSettings
from finetuning.tasks.question import Question
from finetuning.tasks.reading import read_questions, read_task_rows
from finetuning.tasks.scoring import Prepared, prepare
from finetuning.tasks.tasks import TASKS, Task

# Rows that a run's clients evaluate together; scores come from the whole model instead.
_EVALUATED_IN_RUN = 16
_NO_LIMIT = 2**31


@dataclass(frozen=True)
class TaskData:
    """A task's rows, written for a run, and its held-out questions.

    Attributes:
        folder: Folder for ``data.path``.
        prepared: The questions that are scored, as tokens.
        held_out: The same with their right answers, for the held-out loss.
        training_rows: Number of rows that are trained on, or chosen from.

    """

    folder: Path
    prepared: Prepared
    held_out: list[Example]
    training_rows: int


def write_task(
    task_name: str,
    parts: tuple[Path, Path],
    tokenizer: Any,
    training: TaskTraining,
    folder: Path,
) -> TaskData:
    """Choose a task's rows, and write them to a folder.

    Questions with candidates are left out if they don't fit into ``max_length``, since they would
    lose their ends; prompts of generated answers are shortened.

    Args:
        task_name: Name of the task.
        parts: Files of the training rows and of the held-out rows.
        tokenizer: Tokenizer of the base model.
        training: How many rows, of which length.
        folder: Where to write.

    Raises:
        DataError: Rows are missing or malformed, or none fits.

    """
    task = TASKS[task_name]
    settings = DataSettings(task=task_name)  # type: ignore[arg-type]
    longest = training.max_length if task.is_cloze else _NO_LIMIT
    train, test = (_fitting(file, task, tokenizer, longest) for file in parts)
    scored = _first(test, training.questions)
    _write(folder / "train.jsonl", train)
    _write(folder / f"{task.held_out}.jsonl", _of_all_labels(test, _EVALUATED_IN_RUN))
    _write(folder / "scored.jsonl", scored)
    questions = read_questions(folder / "scored.jsonl", task)
    rows = read_task_rows(folder / "scored.jsonl", settings)
    held_out, _ = tokenize(rows, tokenizer, training.max_length)
    return TaskData(
        folder=folder,
        prepared=prepare(tokenizer, task, questions, training.max_length),
        held_out=held_out,
        training_rows=len(read_task_rows(folder / "train.jsonl", settings)),
    )


def write_rows(task_name: str, parts: tuple[Path, Path], folder: Path) -> None:
    """Write all of a task's training rows, and a few held-out rows, to a folder for a run.

    Args:
        task_name: Name of the task.
        parts: Files of the training rows and of the held-out rows.
        folder: Where to write.

    Raises:
        DataError: Rows are missing or malformed.

    """
    task = TASKS[task_name]
    train, test = (_lines(file, task) for file in parts)
    _write(folder / "train.jsonl", train)
    _write(folder / f"{task.held_out}.jsonl", test[:_EVALUATED_IN_RUN])


@dataclass(frozen=True)
class _Line:
    value: Any
    questions: Sequence[Question]


def _fitting(file: Path, task: Task, tokenizer: Any, longest: int) -> list[_Line]:
    """Return the lines of which all questions fit, with their longest answers."""
    lines = _lines(file, task)
    rows = [_longest_row(question) for line in lines for question in line.questions]
    lengths = dict.fromkeys(range(len(rows)), 0)
    for example in tokenize(rows, tokenizer, _NO_LIMIT)[0]:
        lengths[example.row] = max(lengths[example.row], len(example.tokens))
    each = iter(lengths.values())
    fitting = [line for line in lines if max([next(each) for _ in line.questions]) <= longest]
    if not fitting:
        raise DataError(f"{file}: no row has at most {longest} tokens")
    return fitting


def _lines(file: Path, task: Task) -> list[_Line]:
    lines, problems = parse_rows(
        file, "train", lambda origin, value: _Line(value, task.convert(origin, value))
    )
    refuse_malformed(problems, len(lines), "download it again")
    if not lines:
        raise DataError(f"no rows in {file}")
    return lines


def _longest_row(question: Question) -> Row:
    (row,) = prompt_rows([question.prompt])
    answer = max((*question.answers, *question.candidates), key=len)
    messages = (row.messages[0], {"role": "assistant", "content": answer})
    return Row(messages, question.origin, {})


def _first(lines: Sequence[_Line], questions: int) -> list[_Line]:
    """Return the first lines that have so many questions together; 0 for all lines."""
    chosen: list[_Line] = []
    count = 0
    for line in lines:
        if questions and count >= questions:
            break
        chosen.append(line)
        count += len(line.questions)
    return chosen


def _of_all_labels(lines: Sequence[_Line], count: int) -> list[_Line]:
    """Return lines of all labels, so that a division by label leaves no client without any."""
    by_label: dict[str, list[_Line]] = {}
    for line in lines:
        by_label.setdefault(str(_label(line)), []).append(line)
    share = max(1, count // len(by_label))
    return [line for own in by_label.values() for line in own[:share]]


def _label(line: _Line) -> Any:
    return line.value.get("label") if isinstance(line.value, dict) else None


def _write(file: Path, lines: Sequence[_Line]) -> None:
    text = "".join(json.dumps(line.value, ensure_ascii=False) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
