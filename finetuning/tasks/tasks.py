"""All tasks by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from finetuning.tasks import generated_text, metrics, superglue
from finetuning.tasks.question import Question


@dataclass(frozen=True)
class Task:
    """A task: how its rows are read, and how its answers are scored.

    Attributes:
        folder: Usual name of the folder with the task's files.
        held_out: Usual name of the file for evaluation.
        convert: Converts a row's origin and value to questions.
        metrics: Scores answers.
        complete: Adds information from other rows to questions.
        is_cloze: Whether an answer is chosen from candidates; otherwise it is generated.
        has_classes: Whether the candidates have the same meaning in all questions.
        has_words: Whether the candidates are single words, whose probabilities are normalised.

    """

    folder: str
    held_out: str
    convert: Callable[[str, Any], list[Question]]
    metrics: Callable[[Sequence[Question], Sequence[str]], dict[str, float]]
    complete: Callable[[list[Question]], list[Question]] = list
    is_cloze: bool = True
    has_classes: bool = True
    has_words: bool = True


def _generated(
    folder: str,
    held_out: str,
    convert: Callable[[str, Any], list[Question]],
    metrics: Callable[[Sequence[Question], Sequence[str]], dict[str, float]],
) -> Task:
    return Task(
        folder=folder,
        held_out=held_out,
        convert=convert,
        metrics=metrics,
        is_cloze=False,
        has_classes=False,
        has_words=False,
    )


TASKS: Mapping[str, Task] = {
    "boolq": Task(
        folder="BoolQ", held_out="val", convert=superglue.boolq, metrics=metrics.accuracy
    ),
    "cb": Task(folder="CB", held_out="val", convert=superglue.cb, metrics=metrics.commitment_bank),
    "copa": Task(
        folder="COPA",
        held_out="val",
        convert=superglue.copa,
        metrics=metrics.accuracy,
        has_words=False,
    ),
    "multirc": Task(
        folder="MultiRC", held_out="val", convert=superglue.multirc, metrics=metrics.multirc
    ),
    "record": Task(
        folder="ReCoRD",
        held_out="val",
        convert=superglue.record,
        metrics=metrics.record,
        has_classes=False,
        has_words=False,
    ),
    "rte": Task(folder="RTE", held_out="val", convert=superglue.rte, metrics=metrics.accuracy),
    "wic": Task(folder="WiC", held_out="val", convert=superglue.wic, metrics=metrics.accuracy),
    "wsc": Task(
        folder="WSC",
        held_out="val",
        convert=superglue.wsc,
        metrics=metrics.winograd,
        complete=superglue.with_other_nouns,
        has_words=False,
    ),
    "cnn-dailymail": _generated(
        folder="cnn_dailymail",
        held_out="test",
        convert=generated_text.cnn_dailymail,
        metrics=metrics.summaries,
    ),
    "xsum": _generated(
        folder="xsum", held_out="test", convert=generated_text.xsum, metrics=metrics.summaries
    ),
    "huatuo": _generated(
        folder="huatuo", held_out="val", convert=generated_text.instruction, metrics=metrics.medical
    ),
    "court": _generated(
        folder="court", held_out="test", convert=generated_text.instruction, metrics=metrics.legal
    ),
    "consultation": _generated(
        folder="consultation",
        held_out="test",
        convert=generated_text.instruction,
        metrics=metrics.legal,
    ),
    "reasoning": _generated(
        folder="reasoning",
        held_out="test",
        convert=generated_text.instruction,
        metrics=metrics.legal,
    ),
}
