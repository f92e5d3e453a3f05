"""Tasks whose answers are generated: summaries, medical answers, and FedJudge's legal tasks."""

from typing import Any

from finetuning.data.formats import DataError
from finetuning.data.rows import parse_messages
from finetuning.tasks.question import Question, as_object, text_of


def cnn_dailymail(origin: str, value: Any) -> list[Question]:
    """Convert a row of CNN/DailyMail."""
    row = as_object(value)
    # Articles that are too long are truncated at the end.
    prompt = f"Summarize this article in a few sentences:\n{text_of(row, 'article')}"
    return [Question(origin, prompt, (text_of(row, "highlights"),))]


def xsum(origin: str, value: Any) -> list[Question]:
    """Convert a row of XSum."""
    row = as_object(value)
    prompt = f"Summarize this article in one sentence:\n{text_of(row, 'document')}"
    return [Question(origin, prompt, (text_of(row, "summary"),))]


def instruction(origin: str, value: Any) -> list[Question]:
    """Convert a row in the training format to one question with its answer."""
    turns = parse_messages(value)
    if [turn["role"] for turn in turns] != ["user", "assistant"]:
        raise DataError("must have one question and its answer")
    return [Question(origin, turns[0]["content"], (turns[1]["content"],))]
