"""Convert conversations to tokens, with a loss only on the answers (FedJudge Eq. 1).

The tokens of an answer are found from the answer's character positions in the rendered text, not by
searching the tokens for the marks that a template writes before answers. A prompt has the same
tokens in training and in generation, because no token spans the boundary to the answer.
"""

import copy
import sys
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from tokenizers import pre_tokenizers

from finetuning.data.chat_template import (
    ChatTemplateError,
    Messages,
    Spans,
    TurnsChangeError,
    guard_contents,
    render_conversation,
    unused_character,
)
from finetuning.data.formats import DataError
from finetuning.data.rows import LeaveOut, Row, report_problems

_ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class Example:
    """A tokenized conversation."""

    tokens: torch.Tensor  # (length,) int64
    is_target: torch.Tensor  # (length,) bool; true for the tokens of answers and their end marks
    prompt_length: int  # number of tokens before the last answer that is not entirely truncated
    reference: str  # text of the last answer that is not entirely truncated
    row: int  # index of the example's row; a template can produce several examples per row
    question: str = ""  # text of the turn before the reference, truncated like the tokens
    origin: str = ""  # file and line that the row was read from; a line can produce several rows


@dataclass(frozen=True)
class _Conversation:
    """A rendered conversation; ``spans`` are the (start, end) character indices of its answers."""

    messages: Messages
    only_last: bool
    text: str
    spans: Spans
    guard: str  # see `guard_contents`
    context: Set[int]  # indices of answers that are not targets

    @classmethod
    def of(
        cls, messages: Messages, tokenizer: Any, only_last: bool, context: Set[int] = frozenset()
    ) -> "_Conversation":
        guard, written = guard_contents(messages, tokenizer)
        return cls(
            messages, only_last, *render_conversation(written, tokenizer, only_last), guard, context
        )


@dataclass(frozen=True)
class _Tokens:
    """A tokenized conversation; ``spans`` are the (first, after) token indices of its answers."""

    input_ids: list[int]
    spans: Spans


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
    marks = _marks(tokenizer)
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
        encoded = _encode(conversations, tokenizer) if conversations else []
        for row, fitted, tokens in zip(indices, conversations, encoded, strict=True):
            was_shortened = False
            while len(tokens.input_ids) > max_length:
                shorter = _shorten(fitted, tokenizer, len(tokens.input_ids) - max_length)
                if shorter is None:
                    break
                fitted, was_shortened = shorter, True  # noqa: PLW2901
                (tokens,) = _encode([fitted], tokenizer)  # noqa: PLW2901
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
    spans = [(start, min(after, until)) for start, after in conversation.spans]
    (tokens,) = _encode(
        [replace(conversation, text=conversation.text[:until], spans=spans)], tokenizer
    )
    return torch.tensor(tokens.input_ids, dtype=torch.int64)


def end_marks(tokenizer: Any) -> set[int]:
    """Return the tokens, if any, that the chat template writes to end answers in training.

    These tokens may differ from the checkpoint's end-of-text tokens.
    """
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    try:
        conversation = _Conversation.of(turns, tokenizer, True)
    except ChatTemplateError:  # The template may require a system turn.
        return set()
    (tokens,) = _encode([conversation], tokenizer)
    return _end_marks(tokens, _marks(tokenizer))


def _end_marks(tokens: _Tokens, marks: Set[int]) -> set[int]:
    _, after = tokens.spans[-1]
    return {tokens.input_ids[after - 1]} & marks


def _marks(tokenizer: Any) -> frozenset[int]:
    """Return the tokenizer's added tokens, except whitespace, which Gemma's tokenizer adds."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(number for number, token in added if token.content.strip())


def _conversations(row: Row, tokenizer: Any) -> list[_Conversation]:
    """Render a row as a whole, or once for each answer if the template requires it.

    Raise a DataError without the row's origin if the template rejects the row.
    """
    ends = [i + 1 for i, turn in enumerate(row.messages) if turn["role"] == "assistant"]
    ends = [end for end in ends if end - 1 not in row.context]
    try:
        try:
            return [_Conversation.of(row.messages[: ends[-1]], tokenizer, False, row.context)]
        except TurnsChangeError:
            return [_Conversation.of(row.messages[:end], tokenizer, True) for end in ends]
    except ChatTemplateError as error:
        raise DataError("the chat template rejects this row", str(error)) from error


def _encode(conversations: Sequence[_Conversation], tokenizer: Any) -> list[_Tokens]:
    """Tokenize rendered conversations and find their answers' tokens."""
    marks = _marks(tokenizer)
    # A tokenizer that prefixes each text with a mark (SentencePiece's "▁") must encode whole texts.
    if "".join(tokenizer.tokenize("x")).startswith(("▁", "Ġ")):
        encode = _encode_whole
    else:
        encode = _encode_pieces
    encoded: dict[int, _Tokens] = {}
    for guard in {c.guard for c in conversations}:
        chosen = [index for index, c in enumerate(conversations) if c.guard == guard]
        own = without_guard(tokenizer, guard)
        encoded |= zip(chosen, encode([conversations[i] for i in chosen], own), strict=True)
    for tokens in encoded.values():
        for index, (first, after) in enumerate(tokens.spans):
            # Whitespace after an answer's end mark belongs to the template.
            ends = [i + 1 for i in range(first, after) if tokens.input_ids[i] in marks]
            if ends and not tokenizer.decode(tokens.input_ids[ends[-1] : after]).strip():
                tokens.spans[index] = (first, ends[-1])
    return [encoded[index] for index in range(len(conversations))]


@lru_cache(maxsize=4)
def without_guard(tokenizer: Any, guard: str) -> Any:
    """Return a copy of a tokenizer that ends a word at each ``guard``, and removes it.

    No token contains characters of two words, so none can be the token that was broken up.
    """
    if not guard:
        return tokenizer
    other = copy.deepcopy(tokenizer)
    own = other.backend_tokenizer.pre_tokenizer
    parts = [pre_tokenizers.Split(guard, "removed"), *([own] if own else [])]
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    return other


def _encode_pieces(conversations: Sequence[_Conversation], tokenizer: Any) -> list[_Tokens]:
    """Tokenize each answer, and each text before, between and after answers, separately."""
    bounds = [[0, *chain(*c.spans), len(c.text)] for c in conversations]
    pieces = [
        c.text[start:end]
        for c, own_bounds in zip(conversations, bounds, strict=True)
        for start, end in pairwise(own_bounds)
    ]
    encoded_pieces = iter(tokenizer(pieces, add_special_tokens=False)["input_ids"])
    encoded = []
    for own_bounds in bounds:
        own = [next(encoded_pieces) for _ in pairwise(own_bounds)]
        ends = list(accumulate(len(piece) for piece in own))
        encoded.append(_Tokens(list(chain(*own)), list(zip(ends[:-1:2], ends[1::2], strict=True))))
    return encoded


def _encode_whole(conversations: Sequence[_Conversation], tokenizer: Any) -> list[_Tokens]:
    """Tokenize whole texts, and split tokens that span the boundary of a prompt and its answer."""
    texts = [c.text for c in conversations]
    encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    divide, added = tokenizer.backend_tokenizer.model.tokenize, set(tokenizer.added_tokens_decoder)
    encoded = []
    for row, c in enumerate(conversations):
        input_ids, offsets = encoding["input_ids"][row], encoding["offset_mapping"][row]
        begins = [begin for begin, _ in offsets]
        for start, _ in reversed(c.spans):
            last = bisect_left(begins, start) - 1
            begin, end = offsets[last] if last >= 0 else (0, 0)
            # Don't divide an end mark, which can include adjacent whitespace.
            if end > start and input_ids[last] not in added:
                both = c.text[begin:start], c.text[start:end]
                words = (text.replace(c.guard, "").replace(" ", "▁") for text in both)
                before, after = ([token.id for token in divide(word)] for word in words)
                input_ids[last : last + 1] = before + after
                begins[last : last + 1] = [begin] * len(before) + [start] * len(after)
        spans = [(bisect_left(begins, start), bisect_left(begins, end)) for start, end in c.spans]
        encoded.append(_Tokens(input_ids, spans))
    return encoded


def _example(
    conversation: _Conversation, tokens: _Tokens, max_length: int, row: int, origin: str
) -> Example | None:
    """Return an example of at most ``max_length`` tokens, or None if no target remains."""
    is_target = torch.zeros(min(len(tokens.input_ids), max_length), dtype=torch.bool)
    turns = conversation.messages
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    spans = zip(tokens.spans[::-1], answers[::-1], strict=False)
    learnt = [(span, index) for span, index in spans if index not in conversation.context]
    for (first, after), _ in learnt:
        is_target[first:after] = True
    # The first token can't be predicted, because no token precedes it.
    is_target[:1] = False
    if not is_target.any():
        return None
    prompt_length, last = next(
        (max(first, 1), index) for (first, after), index in learnt if first < min(after, max_length)
    )
    return Example(
        tokens=torch.tensor(tokens.input_ids[:max_length], dtype=torch.int64),
        is_target=is_target,
        prompt_length=prompt_length,
        reference=turns[last]["content"],
        row=row,
        question=turns[last - 1]["content"] if last else "",
        origin=origin,
    )


def _shorten(conversation: _Conversation, tokenizer: Any, excess: int) -> _Conversation | None:
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
        return _Conversation.of(messages, tokenizer, conversation.only_last, conversation.context)
    except ChatTemplateError:  # The template may reject an empty input.
        return None
