"""Drafts of the next tokens from the text, which ``generate`` then verifies together."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

_REPEATED = 3  # number of last tokens that must have occurred before


@contextmanager
def drafts_after_repetition(causal_lm: Any) -> Iterator[None]:
    """Restrict drafts from the text (``prompt_lookup_num_tokens``) to places after repeated tokens.

    ``transformers`` also drafts after a single one, but most of these drafts are rejected, and they
    take longer than they save.
    """
    make = causal_lm._get_candidate_generator

    def generator(**arguments: Any) -> Any:
        drafts = make(**arguments)
        if isinstance(drafts, PromptLookupCandidateGenerator):
            look_up = drafts.get_candidates
            drafts.get_candidates = lambda text: look_up(text) if _repeats(text) else (text, None)
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
