"""The rows that a task's cell trains on, and the questions that it scores."""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from bench.paper.sizes import TaskTraining
from finetuning.data.formats import DataError
from finetuning.data.rows import Row, keep_good, parse_rows
from finetuning.data.tokenization import Example, tokenize
from finetuning.files import Stamps, stamps
from finetuning.model.base_model import load_tokenizer
from finetuning.settings import DataSettings
from finetuning.tasks.question import Question
from finetuning.tasks.reading import read_questions, read_task_rows
from finetuning.tasks.scoring import Prepared, prepare
from finetuning.tasks.tasks import TASKS, Task

_NO_LIMIT = 2**31


@dataclass(frozen=True)
class TaskData:
    """A task's rows and held-out questions.

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
    model: Path,
    training: TaskTraining,
    clients: int,
    folder: Path,
) -> TaskData:
    """Choose a task's rows, and write them to a folder.

    Questions with candidates are left out if they don't fit into ``max_length``, since they would
    lose their ends; prompts of generated answers are shortened. The folder's held-out part has as
    few rows as its clients need: the questions are scored with the whole model.

    Args:
        task_name: Name of the task.
        parts: Files of the training rows and of the held-out rows.
        model: Directory of the base model.
        training: How many rows, of which length.
        clients: Number of clients.
        folder: Where to write.

    Raises:
        DataError: There are no rows, or none fits.

    """
    task, tokenizer = TASKS[task_name], load_tokenizer(model)
    longest = training.max_length if task.is_cloze else _NO_LIMIT
    train, test = (_fitting(file, stamps(file), task_name, model, longest) for file in parts)
    _write(folder / "train.jsonl", train)
    _write(folder / f"{task.held_out}.jsonl", _few_of_all_labels(test, clients, task))
    scored = folder / "scored.jsonl"
    _write(scored, _first(test, training.questions, task))
    settings = DataSettings(task=task_name)
    questions = read_questions(scored, task)
    held_out, _ = tokenize(read_task_rows(scored, settings), tokenizer, training.max_length)
    return TaskData(
        folder=folder,
        prepared=prepare(tokenizer, task, questions, training.max_length),
        held_out=held_out,
        training_rows=sum(bool(q.answers) for line in train for q in line.questions),
    )


def write_rows(task_name: str, parts: tuple[Path, Path], clients: int, folder: Path) -> None:
    """Write all of a task's training rows, and a few held-out rows, to a folder for a run.

    Args:
        task_name: Name of the task.
        parts: Files of the training rows and of the held-out rows.
        clients: Number of clients.
        folder: Where to write.

    Raises:
        DataError: There are no rows.

    """
    task = TASKS[task_name]
    train, test = (_lines(file, task) for file in parts)
    _write(folder / "train.jsonl", train)
    _write(folder / f"{task.held_out}.jsonl", _few_of_all_labels(test, clients, task))


@dataclass(frozen=True)
class _Line:
    value: Any
    questions: Sequence[Question]


# Most cells after each other have the same task.
@functools.lru_cache(maxsize=4)
def _fitting(file: Path, _stamps: Stamps, task_name: str, model: Path, longest: int) -> list[_Line]:
    """Return the lines of which all questions fit, with their longest answers."""
    lines = _lines(file, TASKS[task_name])
    rows = [_longest_row(question) for line in lines for question in line.questions]
    lengths = dict.fromkeys(range(len(rows)), 0)
    for example in tokenize(rows, load_tokenizer(model), _NO_LIMIT)[0]:
        lengths[example.row] = max(lengths[example.row], len(example.tokens))
    each = iter(lengths.values())
    fitting = [line for line in lines if max([next(each) for _ in line.questions]) <= longest]
    if not fitting:
        raise DataError(f"{file}: no row has at most {longest} tokens")
    return fitting


def _lines(file: Path, task: Task) -> list[_Line]:
    """Return all lines but malformed ones, which are printed."""
    lines, problems = parse_rows(
        file, lambda origin, value: _Line(value, task.convert(origin, value))
    )
    return keep_good(lines, problems, skip_bad=True, path=file)


def _longest_row(question: Question) -> Row:
    answer = max((*question.answers, *question.candidates), key=len)
    messages = (
        {"role": "user", "content": question.prompt},
        {"role": "assistant", "content": answer},
    )
    return Row(messages, question.origin, {})


def _first(lines: Sequence[_Line], questions: int, task: Task) -> list[_Line]:
    """Return the first lines that have so many questions together; 0 for all lines.

    The first question about each passage comes before the second about any: a few passages of
    MultiRC alone have as many questions as are scored.
    """
    if not questions:
        return list(lines)
    turns = zip_longest(*(_divided(line, task) for line in lines))
    chosen: list[_Line] = []
    count = 0
    for line in filter(None, chain.from_iterable(turns)):
        if count >= questions:
            break
        chosen.append(line)
        count += len(line.questions)
    return chosen


def _divided(line: _Line, task: Task) -> list[_Line]:
    """Return a line for each question about a passage (MultiRC, ReCoRD), or the line itself."""
    value, passage = line.value, line.value.get("passage")
    if "qas" in value:
        values = [value | {"qas": [asked]} for asked in value["qas"]]
    elif isinstance(passage, dict):
        asked_of_it = passage["questions"]
        values = [value | {"passage": passage | {"questions": [asked]}} for asked in asked_of_it]
    else:
        return [line]
    return [_Line(each, task.convert("", each)) for each in values]


def _few_of_all_labels(lines: Sequence[_Line], count: int, task: Task) -> list[_Line]:
    """Return the shortest lines: at least ``count``, and at least one of each label.

    A passage with many questions counts as a line for each.
    """
    by_label: dict[str, list[_Line]] = {}
    divided = [own for line in lines for own in _divided(line, task)]
    for line in sorted(divided, key=lambda line: len(json.dumps(line.value))):
        # Without a right answer, as of a wrong noun of WSC, there is nothing to measure.
        if any(question.answers for question in line.questions):
            by_label.setdefault(str(line.value.get("label")), []).append(line)
    share = math.ceil(count / len(by_label))
    return [line for own in by_label.values() for line in own[:share]]


def _write(file: Path, lines: Sequence[_Line]) -> None:
    text = "".join(json.dumps(line.value, ensure_ascii=False) + "\n" for line in lines)
    file.write_text(text, encoding="utf-8")
