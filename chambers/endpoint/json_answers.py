"""Constrain answers to a JSON schema, with ``llguidance``."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

from chambers.endpoint.answer_stream import Request


def grammar_of(schema: dict[str, Any]) -> str:
    """Return the grammar of a JSON schema's values, written without optional whitespace.

    Raise ``ValueError`` if the schema is invalid, or has keys that aren't supported.
    """
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )
    if problem := LLMatcher.validate_grammar(grammar):
        raise ValueError(f"the JSON schema can't be used: {problem}")
    return grammar


class Constraint:
    """A logits processor that excludes tokens which the requests' grammars don't allow.

    ``tokens_of`` returns the tokens for a number of logits per position, and ``columns`` is the
    number of columns of the padded prompts. If generation starts again, as after a lost connection,
    so do the answers.
    """

    def __init__(
        self, batch: Sequence[Request], tokens_of: Callable[[int], LLTokenizer], columns: int
    ) -> None:
        self._tokens_of, self._columns = tokens_of, columns
        self._grammars = {i: each.grammar for i, each in enumerate(batch) if each.grammar}
        self._matchers: dict[int, LLMatcher] = {}
        self._read = 0  # number of new columns that the matchers have read

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores, (rows, vocabulary), with -inf for excluded tokens."""
        if input_ids.shape[1] == self._columns:
            tokens, self._read = self._tokens_of(scores.shape[1]), 0
            self._matchers = {
                i: LLMatcher(tokens, grammar, log_level=0) for i, grammar in self._grammars.items()
            }
        added = input_ids[:, self._columns + self._read :].tolist()
        self._read = input_ids.shape[1] - self._columns
        scores = scores.clone()
        for index, matcher in self._matchers.items():
            # An answer that has ended is followed by padding, which no grammar allows.
            if not matcher.is_stopped() and matcher.consume_tokens(added[index]):
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")).bool()
                excluded = ~allowed[: scores.shape[1]].to(scores.device)
                scores[index].masked_fill_(excluded, -torch.inf)
        return scores
