"""Drafts of the next tokens, which ``generate`` then verifies together.

Drafts come from the text itself, or from the answers of rows (REST, arXiv 2311.08252): institutions
have texts of the kind that their model generates.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from finetuning.data.tokenization import Example

_REPEATED = 3  # number of last tokens that must have occurred before in the text
_CONTEXT = 8  # maximum number of last tokens that select a place in the rows
_NEWEST = 0.2  # weight of the newest value in moving averages
_DECAY = 0.998  # factor of the times measured for other numbers of tokens, with each pass
_ACCEPTED, _EXPECTED = 0.5, 1.0  # accepted and expected drafts that a text begins with


class RowDrafts:
    """The tokens that follow in the answers of rows after the last tokens of a text.

    A block server receives drafts, so what only one row says is never drafted. Longer contexts are
    used only where the next token depends on them.

    The times of passes are measured, so that as many tokens are drafted as save most time.
    """

    def __init__(self, rows: Sequence[Example]) -> None:
        # For each length, the token that follows a context in most rows, and its share of them.
        self._tables: list[dict[tuple[int, ...], tuple[int, float]]] = []
        self.seconds: dict[int, float] = {}  # moving averages for passes, by number of new tokens
        texts = [row.tokens.tolist() for row in rows]
        # The row and position of each token that may be drafted.
        places = [
            (number, place)
            for number, row in enumerate(rows)
            for place in row.is_target.nonzero().flatten().tolist()
            if place
        ]
        for length in range(1, _CONTEXT + 1):
            followers: dict[tuple[int, ...], dict[int, set[int]]] = {}
            contexts = [tuple(texts[row][place - length : place]) for row, place in places]
            for (row, place), context in zip(places, contexts, strict=True):
                followers.setdefault(context, {}).setdefault(texts[row][place], set()).add(row)
            self._tables.append(dict(_commonest(followers)))
            places = [
                (row, place)
                for (row, place), context in zip(places, contexts, strict=True)
                if len(followers[context]) > 1 and place > length
            ]

    def next_token(self, text: Sequence[int]) -> tuple[int, float] | None:
        """Return the likeliest token after a text and its probability; None if it is unknown."""
        found = None
        for length, table in enumerate(self._tables, start=1):
            longer = table.get(tuple(text[-length:]))
            if longer is None:
                break
            found = longer
        return found

    def add_pass(self, tokens: int, seconds: float) -> None:
        """Add the time of a pass with ``tokens`` new tokens."""
        before = self.seconds.get(tokens, seconds)
        # Let the other times decay, so that a number of tokens that was slow once is tried again.
        self.seconds = {number: _DECAY * each for number, each in self.seconds.items()}
        self.seconds[tokens] = before + _NEWEST * (seconds - before)

    def best_number(self, cumulative: Sequence[float]) -> int:
        """Return the number of drafts that is expected to yield the most tokens per second.

        ``cumulative`` has, for each draft, the probability that it and all before it are right.
        """
        # A pass with n drafts has n + 1 new tokens, and yields the right drafts and one more token.
        tokens = np.cumsum([1.0, *cumulative])
        measured = sorted(self.seconds.items()) or [(1, 1.0)]
        numbers, seconds = zip(*measured, strict=True)
        times = np.interp(np.arange(1, len(tokens) + 1), numbers, seconds)
        return int(np.argmax(tokens / times))


def _commonest(
    followers: Mapping[tuple[int, ...], Mapping[int, Collection[int]]],
) -> Iterator[tuple[tuple[int, ...], tuple[int, float]]]:
    """Yield each context with the token that follows in most rows, if there are several."""
    for context, rows_of in followers.items():
        token = max(rows_of, key=lambda each: len(rows_of[each]))
        if len(rows_of[token]) > 1:
            yield context, (token, len(rows_of[token]) / (1 + sum(map(len, rows_of.values()))))


class _Drafter:
    """Draft from rows, or else from the text, as a candidate generator of ``transformers``."""

    requires_model_outputs = False

    def __init__(
        self, rows: RowDrafts, most: int, from_text: Callable[[torch.Tensor], Any]
    ) -> None:
        self._rows, self._most, self._from_text = rows, most, from_text
        self._probabilities: list[float] = []  # of the drafts from rows in the current pass
        self._accepted, self._expected = _ACCEPTED, _EXPECTED
        self._new = 0  # number of new tokens in the current pass; 0 in the first one
        self._began = 0.0

    def get_candidates(self, text: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the text, (1, tokens), and drafts after it."""
        if self._new:
            self._rows.add_pass(self._new, time.perf_counter() - self._began)
        length = text.shape[1]
        drafts = self._draft(text[0, -_CONTEXT:].tolist())
        if drafts:
            text = torch.cat([text, text.new_tensor([drafts])], dim=1)
        else:
            text, _ = self._from_text(text)
        # The first pass, which contains the prompt, isn't measured.
        self._new = text.shape[1] - length + 1 if self._began else 0
        self._began = time.perf_counter()
        return text, None

    def update_candidate_strategy(self, _: Any, __: Any, matches: int) -> None:
        """Count the drafts up to the first wrong one, and those among them that were right."""
        judged = self._probabilities[: int(matches) + 1]
        self._accepted += min(int(matches), len(judged))
        self._expected += sum(judged)

    def _draft(self, text: list[int]) -> list[int]:
        """Return the drafts that are expected to save most time."""
        known, trust = len(text), self._accepted / self._expected
        probabilities, cumulative, all_right = [], list[float](), 1.0
        while len(cumulative) < self._most and (found := self._rows.next_token(text)):
            token, probability = found
            text = [*text, token]
            all_right *= min(1.0, trust * probability)
            probabilities.append(probability)
            cumulative.append(all_right)
        number = self._rows.best_number(cumulative)
        self._probabilities = probabilities[:number]
        return text[known : known + number]


@contextmanager
def drafting(causal_lm: Any, rows: RowDrafts | None = None) -> Iterator[None]:
    """Draft from ``rows``, and from the text only after repeated tokens.

    ``generate`` drafts if its argument ``prompt_lookup_num_tokens`` is set. ``transformers`` also
    drafts after a single token of the text, but most of these drafts are rejected, and they take
    longer than they save.
    """
    make = causal_lm._get_candidate_generator

    def generator(**arguments: Any) -> Any:
        drafts = make(**arguments)
        if isinstance(drafts, PromptLookupCandidateGenerator):
            look_up = drafts.get_candidates
            drafts.get_candidates = lambda text: look_up(text) if _repeats(text) else (text, None)
            if rows is not None:
                return _Drafter(rows, drafts.num_output_tokens, drafts.get_candidates)
        return drafts

    causal_lm._get_candidate_generator = generator
    try:
        yield
    finally:
        del causal_lm._get_candidate_generator


def _repeats(text: torch.Tensor) -> bool:
    """Return whether the last tokens of a text, (1, tokens), have occurred in it before."""
    before, last = text[0, :-1], text[0, -_REPEATED:]
    return len(before) >= _REPEATED and bool((before.unfold(0, _REPEATED, 1) == last).all(1).any())
