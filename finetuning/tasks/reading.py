"""Read the questions of a task, and training rows."""

from pathlib import Path

from finetuning.data.rows import Row, keep_good, parse_rows, read_rows, refuse_malformed
from finetuning.settings import DataSettings
from finetuning.tasks.question import Question
from finetuning.tasks.tasks import TASKS, Task


def read_questions(path: Path, task: Task) -> list[Question]:
    """Read a task's questions from a file in the task's format.

    Raises:
        DataError: The file is missing or empty, or rows are malformed; the message
            names file, line and reason.

    """
    rows, problems = parse_rows(path, task.convert)
    refuse_malformed(problems, len(rows), "fix them")
    kept = keep_good(rows, problems, skip_bad=False, path=path)
    return task.complete([question for row in kept for question in row])


def read_task_rows(path: Path | str, settings: DataSettings) -> list[Row]:
    """Read training rows, in the format of the settings' task if they name one.

    Each question becomes a row with its first right answer. Questions without a right answer, such
    as WSC questions with a wrong noun, are skipped.

    Args:
        path: As for `read_rows`.
        settings: The run's data settings.

    Raises:
        DataError: The data is missing or empty, or rows are malformed; the message
            names file, line and reason.

    """
    if not settings.task:
        return read_rows(path, skip_bad=settings.skip_bad_rows)
    task = TASKS[settings.task]
    rows, problems = parse_rows(path, lambda origin, value: (value, task.convert(origin, value)))
    return [
        Row(
            messages=(
                {"role": "user", "content": question.prompt},
                {"role": "assistant", "content": question.answers[0]},
            ),
            origin=question.origin,
            fields={"label": question.answers[0], **value},
        )
        for value, questions in keep_good(
            rows=rows, problems=problems, skip_bad=settings.skip_bad_rows, path=path
        )
        for question in questions
        if question.answers
    ]


def held_out_part(settings: DataSettings) -> str:
    """Return the name of the file of held-out rows, without its suffix."""
    return TASKS[settings.task].held_out if settings.task else "test"
