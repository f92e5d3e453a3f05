"""The tasks' official metrics, each within 0..1.

The arguments of all metrics are questions and the answer that was chosen or generated for each.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from finetuning.evaluation.scoring import score
from finetuning.tasks.question import Question

_ARTICLE = re.compile(r"\b(a|an|the)\b")


def score_accuracy(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Return the share of questions that are answered correctly."""
    return {"accuracy": fmean(p in q.answers for q, p in zip(questions, predictions, strict=True))}


def score_commitment_bank(
    questions: Sequence[Question], predictions: Sequence[str]
) -> dict[str, float]:
    """Return accuracy and macro-F1, the mean F1 over the classes in labels or predictions."""
    right = [question.answers[0] for question in questions]
    classes = sorted({*right, *predictions})
    f1 = fmean(_f1([r == c for r in right], [p == c for p in predictions]) for c in classes)
    return {**score_accuracy(questions, predictions), "f1": f1}


def score_winograd(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Return the accuracy over nouns: right nouns must be chosen, wrong nouns must not."""
    pairs = zip(questions, predictions, strict=True)
    return {"accuracy": fmean((p == q.candidates[0]) == bool(q.answers) for q, p in pairs)}


def score_multirc(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Return F1a over all answers, and EM, the share of questions with only right predictions."""
    right = [question.answers[0] == "yes" for question in questions]
    predicted = [prediction == "yes" for prediction in predictions]
    groups: dict[str, bool] = {}
    for question, is_right, is_predicted in zip(questions, right, predicted, strict=True):
        groups[question.group] = groups.get(question.group, True) and is_right == is_predicted
    return {"f1a": _f1(right, predicted), "em": fmean(groups.values())}


def score_record(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Return token F1 and exact match, each the maximum over a question's right answers."""
    f1, exact = [], []
    for question, prediction in zip(questions, predictions, strict=True):
        predicted = _words(prediction)
        expected = [_words(answer) for answer in question.answers]
        f1.append(max((_token_f1(predicted, words) for words in expected), default=0.0))
        exact.append(predicted in expected)
    return {"f1": fmean(f1), "em": fmean(exact)}


def score_generated(
    questions: Sequence[Question], predictions: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return the named scores of `score` for generated answers."""
    scores = score(predictions, [question.answers[0] for question in questions])
    return {name: scores[name] for name in names}


def _f1(right: Sequence[bool], predicted: Sequence[bool]) -> float:
    """Return F1 of the positive class; 0 if there are no true positives."""
    both = sum(r and p for r, p in zip(right, predicted, strict=True))
    return 2 * both / (sum(right) + sum(predicted)) if both else 0.0


def _words(text: str) -> list[str]:
    """Return a text's words, normalised as in SQuAD's evaluation."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLE.sub(" ", kept).split()


def _token_f1(predicted: Sequence[str], expected: Sequence[str]) -> float:
    both = (Counter(predicted) & Counter(expected)).total()
    return 2 * both / (len(predicted) + len(expected)) if both else 0.0
