"""Mean scores per model, and the agreement between annotators."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

from chambers.errors import CommandError
from chambers.sheet.blinding import CRITERIA, Key
from chambers.sheet.filled import read_sheet

# Scores, keyed by id and criterion.
Scores = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class Results:
    """The results of a human evaluation."""

    annotators: int  # number of sheets
    questions: int
    # Mean scores by model and criterion (FedJudge, table 5), with half the width of their 95 %
    # confidence intervals over questions, by Student's t, if there are several questions.
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


def evaluate(key: Key, files: Sequence[Path]) -> Results:
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
    return Results(annotators=len(read), questions=len(questions), means=means, agreement=agreement)


def _mean(scores: Scores, key: Key, model: str, criterion: str) -> str:
    by_question: dict[str, list[int]] = defaultdict(list)
    for name, values in scores.items():
        if key.rows[name].model == model:
            by_question[key.rows[name].question].append(values[criterion])
    means = [mean(values) for values in by_question.values()]
    if len(means) == 1:
        return f"{means[0]:.2f}"
    from scipy.stats import t

    half_width = t.ppf(0.975, len(means) - 1) * stdev(means) / math.sqrt(len(means))
    return f"{mean(means):.2f} ± {half_width:.2f}"


def _alpha(scores: Scores, key: Key, criterion: str) -> float | None:
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
