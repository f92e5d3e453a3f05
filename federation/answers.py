"""Answers to held-out questions, sent as text only if the run config and the policy allow it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message

from federation.messages import one_line

ANSWERS = "answers"
MODELS = ("base", "alone", "global", "personalised")


@dataclass(frozen=True)
class Answer:
    """A model's answer to a held-out question; ``answers_record`` puts each text on one line."""

    model: str  # one of ``MODELS``
    question: str
    reference: str
    text: str  # the generated answer


_FIELDS = ("model", "question", "reference", "text")


def answers_record(answers: Sequence[Answer]) -> ConfigRecord:
    """Return answers as a ConfigRecord with one list for each field."""
    return ConfigRecord({f: [one_line(getattr(a, f)) for a in answers] for f in _FIELDS})


def answers_problem(reply: Message, most: int) -> str | None:
    """Return why a reply's answers are refused, or None; ``most`` is the limit for each model."""
    record = _record(reply)
    if record is None:
        return None
    if not most:
        return "it sent answers that were not requested"
    columns = list(record.values())
    texts = all(isinstance(c, list) and all(isinstance(v, str) for v in c) for c in columns)
    if set(record) != set(_FIELDS) or not texts or len({len(column) for column in columns}) > 1:
        return "its answers are malformed: each must be a text with a question and a reference"
    models = record["model"]
    if not set(models) <= set(MODELS) or any(models.count(model) > most for model in MODELS):
        return f"it may send at most {most} answers from each of the models {', '.join(MODELS)}"
    return None


def answers_of(reply: Message) -> list[Answer]:
    """Return the answers in a reply that ``answers_problem`` accepted; the list may be empty."""
    record = _record(reply)
    if record is None:
        return []
    rows = zip(*(record[field] for field in _FIELDS), strict=True)
    return [Answer(*map(one_line, row)) for row in rows]


def answer_events(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return one ``metrics.jsonl`` event per model that generated answers."""
    by_model: dict[str, list[dict[str, str]]] = {model: [] for model in MODELS}
    for a in answers:
        own = {"question": a.question, "reference": a.reference, "text": a.text}
        by_model[a.model].append(own)
    return [{"event": "answers", "model": m, "answers": own} for m, own in by_model.items() if own]


def _record(reply: Message) -> Mapping[str, Any] | None:
    return reply.content.config_records.get(ANSWERS)
