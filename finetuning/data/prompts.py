"""Prompts for generation, built exactly as training builds the text before an answer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetuning.data.formats import DataError
from finetuning.data.rows import Row, parse_messages, parse_rows, refuse_malformed

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
        DataError: The file is missing or empty, or rows are malformed; the message
            names file, line and reason.

    """
    rows, problems = parse_rows(path, lambda o, v: Row(parse_prompt(v), o, v))
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


@dataclass(frozen=True)
class Prompt:
    """The prompt of a row's last answer, with that answer.

    Attributes:
        tokens: The tokens before the answer, (tokens,) int64.
        question: The turn before the answer as text, as far as it is in the tokens.
        reference: The answer.
        row: Index of the row.
        origin: File and line that the row was read from; several rows can be from one line.

    """

    tokens: "torch.Tensor"
    question: str
    reference: str
    row: int
    origin: str


def prompts_of_answers(rows: Sequence[Row], tokenizer: Any, max_length: int) -> list[Prompt]:
    """Return the prompt of each row's last answer; nothing of it depends on that answer.

    Args:
        rows: Conversations with answers.
        tokenizer: Tokenizer of the base model.
        max_length: Most tokens of a prompt, with those that every answer has. Longer ones lose the
            ends of inputs; a row without room for any answer is left out.

    Raises:
        DataError: The chat template refuses a row, or none is left.

    """
    from finetuning.data.tokenization import tokenize

    answered = []
    for row in rows:
        last = max(i for i, turn in enumerate(row.messages) if turn["role"] == "assistant")
        answered.append((row.messages[:last], row.messages[last]["content"]))
    placeholder = {"role": "assistant", "content": _PLACEHOLDER}
    asked = [
        replace(row, messages=(*before, placeholder))
        for row, (before, _) in zip(rows, answered, strict=True)
    ]
    examples, _ = tokenize(asked, tokenizer, max_length)
    # A template that changes earlier turns makes several examples of a row.
    last_examples = {example.row: example for example in examples}
    prompts = [
        Prompt(
            tokens=example.tokens[: example.prompt_length],
            question=example.question,
            reference=answered[row][1],
            row=row,
            origin=example.origin,
        )
        for row, example in last_examples.items()
        # If earlier answers leave no room for the last one, the example ends with one of them.
        if example.reference == _PLACEHOLDER
    ]
    if rows and not prompts:
        raise DataError(
            f"none of {len(rows)} rows, such as {rows[0].origin}, has room for its last answer: "
            f"raise data.max-length = {max_length}"
        )
    return prompts


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
