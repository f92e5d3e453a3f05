"""Requests, and the text of their answers, emitted piece by piece during generation."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

_BEFORE = 8  # number of tokens of the prompt that are decoded with the answer's

# Log-probability of impossible tokens, as in OpenAI's API: JSON has no infinity.
MIN_LOG_PROBABILITY = -9999.0


@dataclass(frozen=True)
class Piece:
    """A part of an answer: a token's text, which can be empty, and why the answer ends, if so."""

    text: str
    token: int | None = None  # None for text that was withheld until the end
    # In nats; None if it wasn't requested, and for the first token of a prompt.
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, with log-probabilities
    finish_reason: str | None = None  # "stop" or "length"
    of_prompt: bool = False  # whether it repeats a part of the prompt


@dataclass(eq=False)
class Request:
    """A request for one answer; ``emit`` is called with each piece, or with an error."""

    model: str
    prompt: torch.Tensor  # (tokens,) int64
    max_tokens: int
    emit: Callable[[Piece | Exception], None]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    likeliest: int | None = None  # number of tokens in ``Piece.likeliest``; None to omit all
    echo: str | None = None  # text of the prompt, to emit before the answer
    continues: bool = False  # whether the answer continues the prompt's text
    grammar: str = ""  # of llguidance; empty if any text is allowed
    cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # Divided by almost 0, logits would be infinite. If ``top_p`` is 0, one token is left.
        if self.temperature < 0.01 or not self.top_p:
            self.temperature = 0.0

    def shares_batch_with(self, other: "Request") -> bool:
        """Return whether both can be answered by one call of ``generate``.

        An answer with a seed must not depend on others, so it is sampled alone.
        """
        drawn = self.temperature > 0 and (self.seed, other.seed) != (None, None)
        same = (self.model, self.temperature, self.top_p)
        return not drawn and same == (other.model, other.temperature, other.top_p)


class AnswerStream:
    """Emits the answers' texts during generation, and ends each at its own limits.

    If a lane was replaced, generation starts again with the same random numbers, and tokens that
    were already emitted are skipped.
    """

    def __init__(
        self, batch: Sequence[Request], tokenizer: Any, ends: set[int], columns: int
    ) -> None:
        # Logits of the next tokens, before temperature and ``top_p``, keyed by column; with
        # drafts, several tokens are verified together.
        self._logits: dict[int, torch.Tensor] = {}
        self._columns = columns
        self._rows = [_Row(request, tokenizer, ends) for request in batch]

    def keep_logits(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Store the logits of the next token; a later call for the same column replaces them."""
        # With drafts, ``scores`` is a view that the processors after this one overwrite.
        self._logits[input_ids.shape[1]] = scores.clone()
        return scores

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return whether each answer is complete, (rows,); ``input_ids`` is (rows, columns)."""
        first = self._columns + min(row.count for row in self._rows if not row.over)
        added = input_ids[:, first:].tolist()
        for index, row in enumerate(self._rows):
            for column in range(self._columns + row.count, input_ids.shape[1]):
                if not row.over:
                    row.add(added[index][column - first], self._logits[column][index])
        self._logits.clear()
        over = [row.over for row in self._rows]
        return torch.tensor(over, device=input_ids.device)


class _Row:
    """The answer to one request so far."""

    def __init__(self, request: Request, tokenizer: Any, ends: set[int]) -> None:
        self.request = request
        self.count = 0
        self.over = False
        self._tokenizer = tokenizer
        self._ends = ends
        # Decoded with the answer, whose first token would lose its space otherwise.
        self._before = request.prompt[-_BEFORE:].tolist() if request.continues else []
        self._skipped = len(self._decode([]))
        self._tokens: list[int] = []
        self._emitted = 0
        # Text that may be the beginning of a stop sequence is withheld.
        self._withheld = max((len(stop) - 1 for stop in request.stop), default=0)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode([*self._before, *tokens], skip_special_tokens=True))

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Add a token, and emit the text that can no longer change."""
        self.count += 1
        if self.request.cancelled.is_set():
            self.over = True
            return
        ended = token in self._ends
        if not ended:
            self._tokens.append(token)
        text = self._decode(self._tokens)[self._skipped :]
        start = max(0, self._emitted - self._withheld)
        stops = [i for stop in self.request.stop if (i := text.find(stop, start)) >= 0]
        reason = "length" if self.count == self.request.max_tokens else None
        if ended or stops:
            reason = "stop"
        if stops:
            text = text[: min(stops)]
        elif reason is None:
            # U+FFFD stands for the bytes of an incomplete character.
            text = text[: max(0, len(text) - self._withheld)].rstrip("\ufffd")
        # After a prompt's log-probabilities, programs expect one for each new token.
        shown = not ended or self.request.echo is not None
        piece = Piece(text[self._emitted :], token if shown else None, finish_reason=reason)
        self._emitted = max(self._emitted, len(text))
        self.over = reason is not None
        if self.request.likeliest is not None and shown:
            row = logits.float().log_softmax(-1)
            row = row.clamp_min(MIN_LOG_PROBABILITY)
            values, tokens = row.topk(min(self.request.likeliest, len(row)))
            likeliest = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            piece = replace(piece, log_probability=float(row[token]), likeliest=likeliest)
        self.request.emit(piece)
