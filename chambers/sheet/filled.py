"""Read sheets filled in by annotators, and check them against the key."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path

from chambers.errors import CommandError, read_bytes
from chambers.sheet.blinding import CRITERIA, HIGHEST, LOWEST, Key

_SHOWN = 20


def read_sheet(file: Path, key: Key) -> tuple[int, Mapping[str, Mapping[str, int]]]:
    """Return the number of a filled-in sheet's annotator, and the scores by id and criterion.

    The file is CSV with columns ``id``, ``usefulness`` and ``fluency``; other columns are ignored.
    Raise ``CommandError``, which lists errors, if the sheet doesn't match the key or is incomplete.
    """
    scores: dict[str, dict[str, int]] = {}
    problems = list(_read_scores(file, key, scores))
    sheets = sorted({key.rows[name].annotator for name in scores})
    if len(sheets) > 1:
        problems.append(f"{file} mixes rows of the sheets {', '.join(map(str, sheets))}")
    elif not sheets:
        problems.append(f"{file} has no row of the key's sheets")
    else:
        problems += [
            f"{file}: the row {name} of question {row.number} is missing"
            for name, row in key.rows.items()
            if row.annotator == sheets[0] and name not in scores
        ]
    if problems:
        shown = problems[:_SHOWN]
        if problems[_SHOWN:]:
            shown.append(f"… and {len(problems) - _SHOWN} more")
        raise CommandError("\n  ".join([f"{file} can't be used:", *shown]))
    return sheets[0], scores


def _read_scores(file: Path, key: Key, scores: dict[str, dict[str, int]]) -> Iterator[str]:
    """Add a file's scores to ``scores``, by id and criterion; yield the errors in its rows."""
    lines: dict[str, int] = {}
    for line, cells in _rows(file):
        name = cells["id"]
        if name not in key.rows:
            yield (
                f"{file}:{line}: the key has no id {name[:40]!r}; either the id was changed, or "
                "the sheet belongs to a different key"
            )
        elif name in lines:
            yield f"{file}:{line}: the id {name} is also on line {lines[name]}"
        else:
            lines[name], scores[name] = line, {}
            for criterion in CRITERIA:
                try:
                    scores[name][criterion] = _score(cells[criterion])
                except ValueError as error:
                    yield f"{file}:{line}: {criterion} {error}"


def _rows(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the line number at which each row begins, and the row's id and scores."""
    wanted = ("id", *CRITERIA)
    # Only ids and scores are used, so any ASCII-compatible encoding is accepted.
    text = read_bytes(file).decode("utf-8-sig", errors="replace")
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    columns: list[str] = []
    line = 1
    try:
        for cells in reader:
            if not columns:
                columns = [cell.strip().lower() for cell in cells]
                absent = [name for name in wanted if columns.count(name) != 1]
                if absent:
                    raise CommandError(
                        f"{file}:{line}: expected exactly one column {absent[0]}; is the file CSV?"
                    )
            elif any(cell.strip() for cell in cells):
                padded = cells + [""] * (len(columns) - len(cells))
                yield line, {name: padded[columns.index(name)].strip() for name in wanted}
            line = reader.line_num + 1
    except csv.Error as error:
        raise CommandError(f"{file}:{line} is not CSV: {error}") from error


def _score(cell: str) -> int:
    """Parse a score, to which a spreadsheet may have added a decimal place."""
    if not cell:
        raise ValueError("is empty")
    try:
        value = float(cell.replace(",", "."))
    except ValueError:
        raise ValueError(f"is {cell[:20]!r}, not a number") from None
    if value not in range(LOWEST, HIGHEST + 1):
        raise ValueError(f"is {cell[:20]}, not one of {LOWEST} to {HIGHEST}")
    return int(value)
