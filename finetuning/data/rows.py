"""Read private rows, and report all malformed rows before training starts."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from finetuning.data.formats import DataError, read_values
from finetuning.data.layouts import Row, parse_row

__all__ = ["LeaveOut", "Row", "parse_rows", "print_left_out", "read_rows", "report_problems"]

_SHOWN_PROBLEMS = 20

Parsed = TypeVar("Parsed")
RowSource = Path | str | Sequence[Path]
# Called for each row that is left out, with its origin and the reason.
LeaveOut = Callable[[str, DataError], None]


def print_left_out(origin: str, reason: DataError) -> None:
    """Print a row that is left out."""
    print(f"left out: {origin}: {reason}", flush=True)


def read_rows(
    path: RowSource, leave_out: LeaveOut | None = None, columns: Mapping[str, str] | None = None
) -> list[Row]:
    """Read conversations; see `parse_rows` for paths and errors, `parse_row` for ``columns``."""
    return parse_rows(path, lambda origin, value: parse_row(origin, value, columns), leave_out)


def parse_rows(
    path: RowSource,
    parse: Callable[[str, Any], Parsed],
    leave_out: LeaveOut | None = None,
    advice: str = "fix them, or set data.skip-bad-rows=true to leave them out",
) -> list[Parsed]:
    """Read rows from a file, several files, or a data set of the Hub; see `formats.read_values`.

    ``parse`` converts an origin and a value to a row, or raises a `DataError` with the reason.
    ``leave_out`` is called for each malformed row, instead of raising. Raise a DataError if the
    data is missing or empty, or rows are malformed; the message names file, line, reason and
    ``advice``.
    """
    rows: list[Parsed] = []
    problems: list[tuple[str, DataError]] = []
    for file in [path] if isinstance(path, str | Path) else path:
        for origin, value in read_values(file):
            try:
                if isinstance(value, DataError):
                    raise value
                rows.append(parse(origin, value))
            except DataError as error:
                problems.append((origin, error))
    total, then = len(problems) + len(rows), leave_out if rows else None
    report_problems(problems, total, then, f"rows are malformed ({advice})")
    if not rows:
        raise DataError(f"no rows in {path if isinstance(path, str | Path) else path[0]}")
    return rows


def report_problems(
    problems: Sequence[tuple[str, DataError]], total: int, leave_out: LeaveOut | None, what: str
) -> None:
    """Call ``leave_out`` for each row with a problem, which is an origin and a reason.

    If it is None, raise a DataError with the reasons; a reason for all rows is shown once.
    """
    if leave_out is not None:
        for origin, reason in problems:
            leave_out(origin, reason)
    elif problems:
        shown = problems[:_SHOWN_PROBLEMS]
        more = [f"… and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        if 1 < len(problems) == total and len({reason.public for _, reason in problems}) == 1:
            shown, more = problems[:1], ["… and all other rows, for the same reason"]
        head = [f"{len(problems)} of {total} {what}:"] if total > 1 else []
        raise DataError(
            "\n  ".join([*head, *(f"{origin}: {reason}" for origin, reason in shown), *more]),
            public="\n  ".join([*head, *(f"{o}: {reason.public}" for o, reason in shown), *more]),
        )
