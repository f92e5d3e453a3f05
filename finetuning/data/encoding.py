"""Tokenize rendered conversations, and find the tokens of their answers."""

import copy
from bisect import bisect_left
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from tokenizers import pre_tokenizers

from finetuning.data.chat_template import Messages, Span, guard_contents, render_conversation

_BEGIN = itemgetter(0)


@dataclass(frozen=True)
class RenderedConversation:
    """A rendered conversation; ``spans`` are the character indices of its answers."""

    messages: Messages
    only_last: bool
    text: str
    spans: list[Span]
    guard: str  # see `guard_contents`
    context: Set[int]  # indices of answers that are not targets

    @classmethod
    def of(
        cls, messages: Messages, tokenizer: Any, only_last: bool, context: Set[int] = frozenset()
    ) -> "RenderedConversation":
        """Render a conversation whose contents can't open or end turns."""
        guard, written = guard_contents(messages, tokenizer)
        return cls(
            messages, only_last, *render_conversation(written, tokenizer, only_last), guard, context
        )


@dataclass(frozen=True)
class EncodedConversation:
    """A tokenized conversation; ``spans`` are the token indices of its answers."""

    input_ids: list[int]
    spans: list[Span]


def encode_conversations(
    conversations: Sequence[RenderedConversation], tokenizer: Any
) -> list[EncodedConversation]:
    """Tokenize rendered conversations and find their answers' tokens."""
    marks = added_tokens(tokenizer)
    # A tokenizer that prefixes each text with a mark (SentencePiece's "▁") must encode whole texts.
    if "".join(tokenizer.tokenize("x")).startswith(("▁", "Ġ")):
        encode = _encode_whole
    else:
        encode = _encode_pieces
    encoded: dict[int, EncodedConversation] = {}
    for guard in {c.guard for c in conversations}:
        chosen = [index for index, c in enumerate(conversations) if c.guard == guard]
        own = without_guard(tokenizer, guard)
        encoded |= zip(chosen, encode([conversations[i] for i in chosen], own), strict=True)
    for tokens in encoded.values():
        for index, span in enumerate(tokens.spans):
            # Whitespace after an answer's end mark belongs to the template.
            ends = [i + 1 for i in range(span.text, span.end) if tokens.input_ids[i] in marks]
            if ends and not tokenizer.decode(tokens.input_ids[ends[-1] : span.end]).strip():
                tokens.spans[index] = span._replace(end=ends[-1])
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


def _encode_pieces(
    conversations: Sequence[RenderedConversation], tokenizer: Any
) -> list[EncodedConversation]:
    """Tokenize each piece of text between the indices of spans separately."""
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
        spans = [Span(*ends[first : first + 3]) for first in range(0, len(ends) - 1, 3)]
        encoded.append(EncodedConversation(list(chain(*own)), spans))
    return encoded


def _encode_whole(
    conversations: Sequence[RenderedConversation], tokenizer: Any
) -> list[EncodedConversation]:
    """Tokenize whole texts, and split tokens that span the boundary of a prompt and its answer."""
    texts = [c.text for c in conversations]
    encoding = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True)
    divide, added = tokenizer.backend_tokenizer.model.tokenize, set(tokenizer.added_tokens_decoder)
    encoded = []
    for row, c in enumerate(conversations):
        input_ids, offsets = encoding["input_ids"][row], encoding["offset_mapping"][row]
        for start in sorted({i for *starts, _ in c.spans for i in starts}, reverse=True):
            last = bisect_left(offsets, start, key=_BEGIN) - 1
            begin, end = offsets[last] if last >= 0 else (0, 0)
            # Don't divide an end mark, which can include adjacent whitespace.
            if end > start and input_ids[last] not in added:
                both = c.text[begin:start], c.text[start:end]
                words = (text.replace(c.guard, "").replace(" ", "▁") for text in both)
                before, after = ([token.id for token in divide(word)] for word in words)
                input_ids[last : last + 1] = before + after
                parts = [(begin, start)] * len(before) + [(start, end)] * len(after)
                offsets[last : last + 1] = parts
        spans = [Span(*(bisect_left(offsets, i, key=_BEGIN) for i in s)) for s in c.spans]
        encoded.append(EncodedConversation(input_ids, spans))
    return encoded


def added_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokenizer's added tokens, except whitespace, which Gemma's tokenizer adds."""
    added = tokenizer.added_tokens_decoder.items()
    return frozenset(number for number, token in added if token.content.strip())
