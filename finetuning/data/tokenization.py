"""Convert conversations to tokens, with a loss only on the answers (FedJudge Eq. 1).

The tokens of an answer are found from the answer's character positions in the rendered text, not by
searching the tokens for the marks that a template writes before answers. A prompt has the same
tokens in training and in generation, because no token spans the boundary to the answer. It ends
with all that the template writes before the answer's text.
"""

import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from finetuning.data.chat_template import (
    ChatTemplateError,
    Span,
    TurnsChangeError,
    unused_character,
)
from finetuning.data.encoding import (
    EncodedConversation,
    RenderedConversation,
    added_tokens,
    encode_conversations,
)
from finetuning.data.formats import DataError
from finetuning.data.rows import LeaveOut, Row, report_problems

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class Example:
    """A tokenized conversation."""

    tokens: torch.Tensor  # (length,) int64
    is_target: torch.Tensor  # (length,) bool; true for the tokens of answers and their end marks
    # Number of tokens before the text of the last answer that is not entirely truncated. Those that
    # the template writes after the generation prompt, such as an empty thought, are also targets.
    prompt_length: int
    reference: str  # text of the last answer that is not entirely truncated
    row: int  # index of the example's row; a template can produce several examples per row
    question: str = ""  # text of the turn before the reference, truncated like the tokens
    origin: str = ""  # file and line that the row was read from; a line can produce several rows


@dataclass
class TokenizationReport:
    """Counts that show the effect of ``data.max-length`` and of the chat template."""

    inputs_shortened: int = 0  # examples with an input truncated so that outputs fit
    outputs_shortened: int = 0  # examples whose outputs were truncated
    left_out: int = 0  # examples omitted because no output token would remain
    rows_divided: int = 0  # rows from which the chat template produced several examples
    # Examples from which a model doesn't learn to stop, because the chat template writes no mark
    # after answers.
    without_end_mark: int = 0
    rejected: set[int] = field(default_factory=set)  # indices of rows that the template rejects
    cut_rows: set[int] = field(default_factory=set)  # indices of rows shortened or left out

    @property
    def cut(self) -> str:
        """The effect of ``data.max-length`` in words; empty if there is none."""
        counts = {
            "inputs shortened": self.inputs_shortened,
            "answers shortened": self.outputs_shortened,
            "left out because no answer fits": self.left_out,
        }
        return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def tokenize(
    rows: Sequence[Row],
    tokenizer: Any,
    max_length: int = sys.maxsize,
    leave_out: LeaveOut | None = None,
) -> tuple[list[Example], TokenizationReport]:
    """Tokenize conversations with the tokenizer's chat template, or in FedJudge's plain form.

    Every returned example has at least one target. A template that renders earlier turns
    differently depending on later turns produces one example per answer instead of one per row.
    Call ``leave_out`` for rows that the template rejects; without it, raise a DataError. Raise one
    if no example has an output that fits.
    """
    examples: list[Example] = []
    report = TokenizationReport()
    problems: list[tuple[str, DataError]] = []
    marks = added_tokens(tokenizer)
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        of_rows = []
        for row, unrendered in enumerate(rows[first : first + _ROWS_AT_ONCE], start=first):
            try:
                of_rows.append(_conversations(unrendered, tokenizer))
            except DataError as reason:
                problems.append((unrendered.origin, reason))
                report.rejected.add(row)
                of_rows.append([])
        report.rows_divided += sum(len(of_row) > 1 for of_row in of_rows)
        conversations = [conversation for of_row in of_rows for conversation in of_row]
        indices = [row for row, of_row in enumerate(of_rows, start=first) for _ in of_row]
        encoded = encode_conversations(conversations, tokenizer) if conversations else []
        for row, fitted, tokens in zip(indices, conversations, encoded, strict=True):
            was_shortened = False
            while len(tokens.input_ids) > max_length:
                shorter = _shorten(fitted, tokenizer, len(tokens.input_ids) - max_length)
                if shorter is None:
                    break
                fitted, was_shortened = shorter, True  # noqa: PLW2901
                (tokens,) = encode_conversations([fitted], tokenizer)  # noqa: PLW2901
            example = _example(
                conversation=fitted,
                tokens=tokens,
                max_length=max_length,
                row=row,
                origin=rows[row].origin,
            )
            if example is None or was_shortened or len(tokens.input_ids) > max_length:
                report.cut_rows.add(row)
            if example is None:
                report.left_out += 1
            else:
                report.without_end_mark += not _end_marks(tokens, marks)
                report.inputs_shortened += was_shortened
                report.outputs_shortened += len(tokens.input_ids) > max_length
                examples.append(example)
    what = "rows can't be used with the model (data.skip-bad-rows=true leaves them out of training)"
    report_problems(problems, len(rows), leave_out if len(problems) < len(rows) else None, what)
    if not examples:
        raise DataError(
            f"none of {len(rows)} rows has an output that fits even partly into data.max-length = "
            f"{max_length} tokens; raise it"
        )
    return examples, report


def tokens_of_beginning(row: Row, tokenizer: Any) -> torch.Tensor:
    """Return the tokens, (tokens,) int64, up to the end of the text of a row's last answer.

    They don't include what the template writes after the answer. Raise a DataError if the template
    rejects the row.
    """
    *before, last = row.messages
    # Only this character shows where the text ends, since a template can write anything after it.
    end = unused_character("".join(turn["content"] for turn in row.messages))
    probed = replace(row, messages=(*before, {**last, "content": last["content"] + end}))
    try:
        conversation = _conversations(probed, tokenizer)[-1]
    except DataError as reason:
        raise reason.at(row.origin) from None
    until = conversation.text.rindex(end)
    spans = [Span(*(min(index, until) for index in span)) for span in conversation.spans]
    (tokens,) = encode_conversations(
        [replace(conversation, text=conversation.text[:until], spans=spans)], tokenizer
    )
    return torch.tensor(tokens.input_ids, dtype=torch.int64)


def end_marks(tokenizer: Any) -> set[int]:
    """Return the tokens, if any, that the chat template writes to end answers in training.

    These tokens may differ from the checkpoint's end-of-text tokens.
    """
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    try:
        conversation = RenderedConversation.of(turns, tokenizer, True)
    except ChatTemplateError:  # The template may require a system turn.
        return set()
    (tokens,) = encode_conversations([conversation], tokenizer)
    return _end_marks(tokens, added_tokens(tokenizer))


def _end_marks(tokens: EncodedConversation, marks: Set[int]) -> set[int]:
    return {tokens.input_ids[tokens.spans[-1].end - 1]} & marks


def _conversations(row: Row, tokenizer: Any) -> list[RenderedConversation]:
    """Render a row as a whole, or once for each answer if the template requires it.

    Raise a DataError without the row's origin if the template rejects the row.
    """
    ends = [i + 1 for i, turn in enumerate(row.messages) if turn["role"] == "assistant"]
    ends = [end for end in ends if end - 1 not in row.context]
    try:
        try:
            turns, only_last = row.messages[: ends[-1]], len(ends) == 1
            return [RenderedConversation.of(turns, tokenizer, only_last, row.context)]
        except TurnsChangeError:
            return [RenderedConversation.of(row.messages[:end], tokenizer, True) for end in ends]
    except ChatTemplateError as error:
        raise DataError("the chat template rejects this row", str(error)) from error


def _example(
    conversation: RenderedConversation,
    tokens: EncodedConversation,
    max_length: int,
    row: int,
    origin: str,
) -> Example | None:
    """Return an example of at most ``max_length`` tokens, or None if no target remains."""
    is_target = torch.zeros(min(len(tokens.input_ids), max_length), dtype=torch.bool)
    turns = conversation.messages
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    spans = zip(tokens.spans[::-1], answers[::-1], strict=False)
    learnt = [
        (span, index)
        for span, index in spans
        if index not in conversation.context and span.text < min(span.end, max_length)
    ]
    for span, _ in learnt:
        is_target[span.start : span.end] = True
    # The first token can't be predicted, because no token precedes it.
    is_target[:1] = False
    if not is_target.any():
        return None
    span, last = learnt[0]
    return Example(
        tokens=torch.tensor(tokens.input_ids[:max_length], dtype=torch.int64),
        is_target=is_target,
        prompt_length=max(span.text, 1),
        reference=turns[last]["content"],
        row=row,
        question=turns[last - 1]["content"] if last else "",
        origin=origin,
    )


def _shorten(
    conversation: RenderedConversation, tokenizer: Any, excess: int
) -> RenderedConversation | None:
    """Remove ``excess`` tokens from the end of the longest input; return None if impossible."""
    messages = [dict(turn) for turn in conversation.messages]
    # If only the last answer is a target, earlier answers are inputs.
    inputs = [t for t in messages[:-1] if conversation.only_last or t["role"] != "assistant"]
    longest = max(inputs, key=lambda turn: len(turn["content"]))
    content = longest["content"]
    if not content:
        return None
    encoding = tokenizer([content], add_special_tokens=False)
    kept = len(encoding["input_ids"][0]) - excess
    end = encoding.token_to_chars(0, kept - 1).end if kept > 0 else 0
    # One removal may not be enough. Remove at least one character, so that the caller's loop ends.
    longest["content"] = content[: min(end, len(content) - 1)].rstrip()
    try:
        return RenderedConversation.of(
            messages, tokenizer, conversation.only_last, conversation.context
        )
    except ChatTemplateError:  # The template may reject an empty input.
        return None
