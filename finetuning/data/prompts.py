"""Prompts for generation, which are identical to the text before an answer in training."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetuning.data.formats import DataError
from finetuning.data.layouts import check_characters, parse_row
from finetuning.data.rows import Row, parse_rows

if TYPE_CHECKING:
    import torch

    from finetuning.data.tokenization import Example

# Any placeholder works, because no token spans the boundary between a prompt and its answer.
_PLACEHOLDER = "x"
_ANSWER = {"role": "assistant", "content": _PLACEHOLDER}


def parse_prompt(value: Any) -> tuple[dict[str, str], ...]:
    """Convert a row to a conversation that ends with a placeholder for the answer.

    Rows have the layouts of `parse_row`, but the last answer is optional. Raise a
    DataError with the reason if the value is not such a row.
    """
    return parse_row("", value, answer=_PLACEHOLDER).messages


def read_prompts(path: Path) -> list[Row]:
    """Read conversations from a file, with a placeholder in place of each row's last answer.

    See `parse_rows` for malformed rows and errors.
    """
    return parse_rows(path, lambda o, v: Row(parse_prompt(v), o, v), advice="fix them")


def prompt_rows(texts: Sequence[str]) -> list[Row]:
    """Convert each text to a row whose instruction is the text.

    Raise a DataError if a text is empty or cannot be encoded in UTF-8.
    """
    return [
        Row(parse_prompt({"instruction": text}), f"prompt {number}", {"instruction": text})
        for number, text in enumerate(texts, start=1)
    ]


def chat_prompt(turns: Sequence[dict[str, str]], tokenizer: Any) -> "torch.Tensor":
    """Return the tokens before the next answer of a conversation, (tokens,) int64.

    A final assistant turn is the beginning of that answer, if it isn't empty. Unlike in rows, other
    answers can be empty, or come first. Raise a DataError if a text can't be encoded in UTF-8, or
    the chat template rejects the conversation.
    """
    from finetuning.data.tokenization import tokens_of_beginning

    for number, turn in enumerate(turns, start=1):
        check_characters(f"turn {number} of 'messages'", turn["content"])
    begun = turns[-1] if turns and turns[-1]["role"] == "assistant" else None
    before = turns[:-1] if begun else turns
    # Templates may change or drop earlier answers' reasoning.
    earlier = frozenset(i for i, turn in enumerate(before) if turn["role"] == "assistant")
    if begun and begun["content"]:
        row = Row((*before, begun), "messages", {}, context=earlier)
        return tokens_of_beginning(row, tokenizer)
    row = Row((*before, _ANSWER), "messages", {}, context=earlier)
    return tokenize_prompts([row], tokenizer)[0]


def prompts_of_answers(rows: Sequence[Row], tokenizer: Any, max_length: int) -> "list[Example]":
    """Return an example for each row's last answer, with only the tokens before the answer.

    The answer's text doesn't affect these tokens; the example's reference is the whole answer. A
    prompt has at most ``max_length`` tokens, including the text that the template writes before an
    answer. Inputs are truncated to fit; a row is omitted if no answer would fit. Raise a DataError
    if the chat template rejects a row, or all rows are omitted.
    """
    asked, references = [], []
    for row in rows:
        last = max(i for i, turn in enumerate(row.messages) if turn["role"] == "assistant")
        references.append(row.messages[last]["content"])
        asked.append(replace(row, messages=(*row.messages[:last], _ANSWER)))
    prompts = [
        replace(
            example,
            tokens=example.tokens[: example.prompt_length],
            is_target=example.is_target[: example.prompt_length],
            reference=references[row],
        )
        for row, example in _last_examples(asked, tokenizer, max_length).items()
        # If the last answer doesn't fit, the example ends with an earlier one.
        if example.reference == _PLACEHOLDER
    ]
    if rows and not prompts:
        raise DataError(
            f"the last answer fits in none of {len(rows)} rows, such as {rows[0].origin}: raise "
            f"data.max-length, which is {max_length}"
        )
    return prompts


def tokenize_prompts(rows: Sequence[Row], tokenizer: Any) -> "list[torch.Tensor]":
    """Return the tokens before each row's last answer, (tokens,) int64, without a length limit.

    Raise a DataError if the chat template rejects a row.
    """
    examples = _last_examples(rows, tokenizer, sys.maxsize)
    return [example.tokens[: example.prompt_length] for example in examples.values()]


def _last_examples(rows: Sequence[Row], tokenizer: Any, max_length: int) -> "dict[int, Example]":
    """Return each row's last example, keyed by the row's index."""
    from finetuning.data.tokenization import tokenize

    # A template that changes earlier turns produces several examples per row.
    return {example.row: example for example in tokenize(rows, tokenizer, max_length)[0]}
