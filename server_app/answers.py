"""Answers that clients sent as text, grouped by question."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from federation.run_folder import Event


@dataclass
class Question:
    """A held-out question of a client, with the models' answers."""

    text: str
    reference: str
    answers: dict[str, str] = field(default_factory=dict)  # the latest answer of each model


def questions(events: Iterable[Event]) -> dict[str, list[Question]]:
    """Return the questions of each client that sent answers, sorted by client name."""
    found: dict[str, dict[tuple[str, str], Question]] = {}
    for event in events:
        if event["event"] == "answers":
            own = found.setdefault(event["client"], {})
            for answer in event["answers"]:
                key = answer["question"], answer["reference"]
                question = own.setdefault(key, Question(*key))
                question.answers[event["model"]] = answer["text"]
    return {client: list(own.values()) for client, own in sorted(found.items())}
