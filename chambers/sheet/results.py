"""Read sheets filled in by annotators: mean scores per model, and the annotators' agreement."""

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np

from chambers.errors import CommandError, read_bytes
from chambers.intervals import interval
from chambers.sheet.blinding import CRITERIA, MAX_SCORE, MIN_SCORE, Key

# Scores, keyed by id and criterion.
SheetScores = Mapping[str, Mapping[str, int]]
_SHOWN = 20


@dataclass(frozen=True)
class SheetResults:
    """The results of a human evaluation."""

    annotators: int  # number of sheets
    questions: int
    # Mean scores by model and criterion (FedJudge, table 5), with half the width of their 95 %
    # confidence intervals over questions, by Student's t, unless all are equal.
    means: Mapping[str, Mapping[str, str]]
    # Krippendorff's alpha by criterion, with the interval metric, since means also treat
    # scores as evenly spaced. 1 is perfect agreement, 0 is chance. None if alpha is undefined,
    # because there is only one annotator or all scores are equal.
    agreement: Mapping[str, float | None]

    def to_markdown(self) -> str:
        """Return the table in Markdown, with the agreement as the last row."""
        lines = [
            f"| Model | {' | '.join(name.capitalize() for name in CRITERIA)} |",
            "|---|" + "---|" * len(CRITERIA),
        ]
        for model, means in self.means.items():
            lines.append(f"| {model} | {' | '.join(means[name] for name in CRITERIA)} |")
        alphas = (self.agreement[name] for name in CRITERIA)
        cells = ("–" if alpha is None else f"{alpha:.2f}" for alpha in alphas)
        lines.append(f"| Krippendorff's alpha | {' | '.join(cells)} |")
        return "\n".join(lines)


def evaluate_sheets(key: Key, files: Sequence[Path]) -> SheetResults:
    """Evaluate filled-in sheets, at most one per annotator; see ``read_sheet`` for their format."""
    scores: dict[str, Mapping[str, int]] = {}
    read: dict[int, Path] = {}
    for file in files:
        annotator, own = read_sheet(file, key)
        if annotator in read:
            raise CommandError(f"{read[annotator]} and {file} are both sheet {annotator}")
        read[annotator] = file
        scores |= own
    means = {
        model: {
            criterion: _mean(scores=scores, key=key, model=model, criterion=criterion)
            for criterion in CRITERIA
        }
        for model in key.models
    }
    agreement = {criterion: _alpha(scores, key, criterion) for criterion in CRITERIA}
    questions = {key.rows[name].question for name in scores}
    return SheetResults(
        annotators=len(read), questions=len(questions), means=means, agreement=agreement
    )


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


def _mean(scores: SheetScores, key: Key, model: str, criterion: str) -> str:
    by_question: dict[str, list[int]] = defaultdict(list)
    for name, values in scores.items():
        if key.rows[name].model == model:
            by_question[key.rows[name].question].append(values[criterion])
    found = interval([np.array([mean(values) for values in by_question.values()])])
    if math.isnan(found.high):
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} ± {found.high - found.mean:.2f}"


def _alpha(scores: SheetScores, key: Key, criterion: str) -> float | None:
    """Return Krippendorff's alpha over all answers, or None if it is undefined."""
    from nltk.metrics.agreement import AnnotationTask
    from nltk.metrics.distance import interval_distance

    data = []
    for name, values in scores.items():
        row = key.rows[name]
        data.append((row.annotator, (row.question, row.model), values[criterion]))
    if len({d[0] for d in data}) < 2 or len({d[2] for d in data}) < 2:
        return None
    return float(AnnotationTask(data, distance=interval_distance).alpha())


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
    if value not in range(MIN_SCORE, MAX_SCORE + 1):
        raise ValueError(f"is {cell[:20]}, not one of {MIN_SCORE} to {MAX_SCORE}")
    return int(value)
