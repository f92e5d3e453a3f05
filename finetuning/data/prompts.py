"""Prompts for generation, built exactly as training builds the text before an answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetuning.data.rows import DataError, Row, parse_messages, parse_rows, refuse_malformed

if TYPE_CHECKING:
    import torch

_NO_LIMIT = 2**31
# Any text does: no token reaches from a prompt into its answer.
_PLACEHOLDER = "x"


def parse_prompt(value: Any) -> tuple[dict[str, str], ...]:
    """Convert a row of either form to a conversation that ends with a placeholder for its answer.

    Args:
        value: As for `parse_messages`, but ``output``, and a last turn that is an answer, are
            optional.

    Raises:
        DataError: The reason why it is not such a row.

    """
    if not isinstance(value, dict):
        return parse_messages(value)
    turns = value.get("messages")
    if turns in (None, ""):
        return parse_messages({**value, "output": _PLACEHOLDER})
    if not isinstance(turns, list) or not turns:
        return parse_messages(value)
    answered = isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant"
    question = turns[:-1] if answered else turns
    answer = {"role": "assistant", "content": _PLACEHOLDER}
    return parse_messages({"messages": [*question, answer]})


def read_prompts(path: Path) -> list[Row]:
    """Read prompts from a file of rows, ignoring each row's last answer.

    Args:
        path: A ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file.

    Returns:
        Conversations that end with a placeholder for the answer.

    Raises:
        DataError: The file is missing or empty, or rows are malformed: file, line and reason.

    """
    rows, problems = parse_rows(path, "train", lambda o, v: Row(parse_prompt(v), o, v))
    refuse_malformed(problems, len(rows), "fix them")
    if not rows:
        raise DataError(f"no rows in {path}")
    return rows


def prompt_rows(texts: Sequence[str]) -> list[Row]:
    """Convert texts to rows, each an instruction.

    Raises:
        DataError: A text is empty or cannot be encoded.

    """
    return [
        Row(parse_prompt({"instruction": text}), f"prompt {number}", {"instruction": text})
        for number, text in enumerate(texts, start=1)
    ]


def tokenize_prompts(rows: Sequence[Row], tokenizer: Any) -> "list[torch.Tensor]":
    """Return the tokens before each row's last answer, (tokens,) int64, without a length limit.

    Raises:
        DataError: The chat template refuses a row.

    """
    from finetuning.data.tokenization import tokenize

    prompts = []
    for row in rows:
        # A template that changes earlier turns makes several examples of a row.
        examples, _ = tokenize([row], tokenizer, _NO_LIMIT)
        prompts.append(examples[-1].tokens[: examples[-1].prompt_length])
    return prompts
