"""Tasks whose answers are generated: summaries, medical answers, and FedJudge's legal tasks."""

from collections.abc import Mapping
from typing import Any

from finetuning.data.formats import DataError
from finetuning.data.layouts import parse_messages
from finetuning.tasks.question import Question, text_of


def cnn_dailymail(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of CNN/DailyMail."""
    # Articles that are too long are truncated at the end.
    prompt = f"Summarize this article in a few sentences:\n{text_of(row, 'article')}"
    return [Question(origin, prompt, (text_of(row, "highlights"),))]


def xsum(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row of XSum."""
    prompt = f"Summarize this article in one sentence:\n{text_of(row, 'document')}"
    return [Question(origin, prompt, (text_of(row, "summary"),))]


def instruction(origin: str, row: Mapping[str, Any]) -> list[Question]:
    """Convert a row in the training format to one question with its answer."""
    turns = parse_messages(row)
    if [turn["role"] for turn in turns] != ["user", "assistant"]:
        raise DataError("must have one question and its answer")
    return [Question(origin, turns[0]["content"], (turns[1]["content"],))]
