"""All tasks by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from finetuning.tasks import generated_text, metrics, superglue
from finetuning.tasks.question import Question


@dataclass(frozen=True)
class Task:
    """A task: how its rows are read, and how its answers are scored.

    ``convert`` converts a row to questions, given its origin and the row. ``complete`` extends each
    question with information from the other rows.
    """

    folder: str  # usual name of the folder with the task's files
    held_out: str  # usual name of the file for evaluation
    convert: Callable[[str, Mapping[str, Any]], list[Question]]
    metrics: Callable[[Sequence[Question], Sequence[str]], dict[str, float]]
    complete: Callable[[list[Question]], list[Question]] = list
    is_cloze: bool = True  # whether an answer is chosen from candidates; otherwise it is generated
    has_classes: bool = True  # whether the candidates have the same meaning in all questions
    has_words: bool = True  # whether candidates are single words, with normalised probabilities


_generated = partial(Task, is_cloze=False, has_classes=False, has_words=False)
# The metrics of FL-GLM section 4.1.2, of FL-GLM on Huatuo-26M, and of FedJudge section 4.2.2.
_summaries = partial(metrics.score_generated, names=("rouge1", "rouge2", "rougeL"))
_medical = partial(metrics.score_generated, names=("bleu4", "rouge1", "rouge2", "rougeL"))
_legal = partial(metrics.score_generated, names=("rouge1", "rouge2", "rougeL", "bleu4", "bleu_n"))

TASKS: Mapping[str, Task] = {
    "boolq": Task("BoolQ", "val", superglue.boolq, metrics.score_accuracy),
    "cb": Task("CB", "val", superglue.cb, metrics.score_commitment_bank),
    "copa": Task("COPA", "val", superglue.copa, metrics.score_accuracy, has_words=False),
    "multirc": Task("MultiRC", "val", superglue.multirc, metrics.score_multirc),
    "record": Task(
        "ReCoRD", "val", superglue.record, metrics.score_record, has_classes=False, has_words=False
    ),
    "rte": Task("RTE", "val", superglue.rte, metrics.score_accuracy),
    "wic": Task("WiC", "val", superglue.wic, metrics.score_accuracy),
    "wsc": Task(
        "WSC",
        "val",
        superglue.wsc,
        metrics.score_winograd,
        superglue.with_other_nouns,
        has_words=False,
    ),
    "cnn-dailymail": _generated("cnn_dailymail", "test", generated_text.cnn_dailymail, _summaries),
    "xsum": _generated("xsum", "test", generated_text.xsum, _summaries),
    "huatuo": _generated("huatuo", "val", generated_text.instruction, _medical),
    "court": _generated("court", "test", generated_text.instruction, _legal),
    "consultation": _generated("consultation", "test", generated_text.instruction, _legal),
    "reasoning": _generated("reasoning", "test", generated_text.instruction, _legal),
}
