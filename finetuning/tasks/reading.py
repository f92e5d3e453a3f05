"""Read the questions of a task, and training rows."""

from finetuning.data.layouts import question_and_answer
from finetuning.data.rows import LeaveOut, Row, RowSource, parse_rows, print_left_out, read_rows
from finetuning.settings import DataSettings
from finetuning.tasks.question import Question, as_object
from finetuning.tasks.tasks import TASKS, Task


def read_questions(path: RowSource, task: Task) -> list[Question]:
    """Read a task's questions from a file in the task's format; see `parse_rows` for errors."""
    rows = parse_rows(path, lambda o, v: task.convert(o, as_object(v)), advice="fix them")
    return task.complete([question for row in rows for question in row])


def read_task_rows(
    path: RowSource, settings: DataSettings, leave_out: LeaveOut | None = None
) -> list[Row]:
    """Read training rows, in the format of ``settings.task`` if it is set.

    Each question becomes a row with its first right answer. Questions without a right answer, such
    as WSC questions with a wrong noun, are skipped. See `parse_rows` for paths and errors; with
    ``settings.skip_bad_rows``, the default of ``leave_out`` is to print the row.
    """
    if settings.skip_bad_rows:
        leave_out = leave_out or print_left_out
    if not settings.task:
        return read_rows(path, leave_out, settings.names_of_columns)
    convert = TASKS[settings.task].convert
    rows = parse_rows(path, lambda o, v: (v, convert(o, as_object(v))), leave_out)
    return [
        Row(
            messages=question_and_answer(question.prompt, question.answers[0]),
            origin=question.origin,
            fields=value,
            layout=settings.task,
            label=question.answers[0],
        )
        for value, questions in rows
        for question in questions
        if question.answers
    ]


def held_out_part(settings: DataSettings) -> str:
    """Return the name of the file of held-out rows, without its suffix."""
    return TASKS[settings.task].held_out if settings.task else "test"
