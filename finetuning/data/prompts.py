"""Prompts for generation, built exactly as training builds what stands before an answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetuning.data.rows import DataError, Row, parse_messages, parse_rows, refuse_malformed

if TYPE_CHECKING:
    import torch

_NO_LIMIT = 2**31
# An answer whose text doesn't matter: no token reaches from a prompt into its answer.
_STAND_IN = "x"


def parse_prompt(value: Any) -> tuple[dict[str, str], ...]:
    """Turn a row of either form into a conversation that ends with a stand-in for its answer.

    Args:
        value: as for ``parse_messages``; ``output``, and a last turn that is an answer, may be
            there or not.

    Raises:
        DataError: the reason why it is not such a row.

    """
    if not isinstance(value, dict):
        return parse_messages(value)
    turns = value.get("messages")
    if turns in (None, ""):
        return parse_messages({**value, "output": _STAND_IN})
    if not isinstance(turns, list) or not turns:
        return parse_messages(value)
    answered = isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant"
    question = turns[:-1] if answered else turns
    return parse_messages({"messages": [*question, {"role": "assistant", "content": _STAND_IN}]})


def read_prompts(path: Path) -> list[Row]:
    """Read what is to be answered from a file of rows, whose own last answers don't matter.

    Args:
        path: a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file.

    Returns:
        Conversations that end with a stand-in for the answer.

    Raises:
        DataError: the file is missing or empty, or rows are malformed: file, line and reason.

    """
    rows, problems = parse_rows(path, "train", parse_prompt)
    refuse_malformed(problems, len(rows), "mend them")
    if not rows:
        raise DataError(f"no rows in {path}")
    return rows


def prompt_rows(texts: Sequence[str]) -> list[Row]:
    """Give texts as rows, each an instruction.

    Raises:
        DataError: one is empty, or no text that can be written.

    """
    rows = [{"instruction": text} for text in texts]
    return [
        Row(parse_prompt(row), f"prompt {number}", dict(row))
        for number, row in enumerate(rows, start=1)
    ]


def tokenize_prompts(rows: Sequence[Row], tokenizer: Any) -> "list[torch.Tensor]":
    """Give the tokens before each row's last answer, (tokens,) int64, not cut to any length.

    Raises:
        DataError: the chat template refuses a row.

    """
    from finetuning.data.tokenization import tokenize

    prompts = []
    for row in rows:
        # A template that changes earlier turns makes several examples of a row.
        examples, _ = tokenize([row], tokenizer, _NO_LIMIT)
        prompts.append(examples[-1].tokens[: examples[-1].prompt_length])
    return prompts
