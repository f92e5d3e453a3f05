"""Answer requests in one thread: batches of requests for the same model, token by token."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch

from chambers.errors import CommandError
from chambers.lane_model import LaneModel, explained
from chambers.models import Source, opened
from finetuning.adapters.adapter import load_adapter
from finetuning.data.tokenization import end_marks
from finetuning.devices import is_broken, memory_problem
from finetuning.errors import UserError
from finetuning.evaluation.generation import sampling
from finetuning.model.positions import trained_positions
from finetuning.model.whole_model import WholeModel
from finetuning.randomness import set_seed
from split.protocol.errors import LaneError

_log = logging.getLogger(__name__)
_LOWEST = -9999.0  # log-probability of impossible tokens, as in OpenAI's API: JSON has no infinity


class BusyError(RuntimeError):
    """Too many requests are waiting."""


@dataclass(frozen=True)
class Limits:
    """Limits of an endpoint."""

    batch_size: int  # number of requests that are answered together
    queue: int  # number of requests that may wait
    max_prompt_length: int  # number of tokens of a prompt
    max_new_tokens: int  # number of tokens of an answer


@dataclass(frozen=True)
class Piece:
    """A part of an answer: the text of a token, which can be empty, and the reason of an end."""

    text: str
    token: int | None = None  # None for text that was withheld until the end
    log_probability: float | None = None  # in nats; None if it wasn't requested
    likeliest: tuple[tuple[int, float], ...] = ()  # the likeliest tokens, with log-probabilities
    finish_reason: str | None = None  # "stop" or "length"


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
    cancelled: threading.Event = field(default_factory=threading.Event)

    def shares_batch_with(self, other: "Request") -> bool:
        """Return whether both can be answered by one call of ``generate``.

        An answer with a seed must not depend on others, so it is sampled alone.
        """
        drawn = self.temperature > 0 and (self.seed, other.seed) != (None, None)
        same = (self.model, self.temperature, self.top_p)
        return not drawn and same == (other.model, other.temperature, other.top_p)


class Answerer:
    """Answers requests for several models with the same base model.

    Use it as a context manager, which loads the model, or opens a lane. ``sources`` are keyed by
    name; all adapters must have the same kind, rank and targets. ``waiting`` has the requests that
    are waiting.
    """

    def __init__(self, sources: Mapping[str, Source], tokenizer: Any, limits: Limits) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.limits = limits
        for first_source, source in pairwise(sources.values()):
            if (source.directory, source.settings) != (
                first_source.directory,
                first_source.settings,
            ):
                raise CommandError(
                    "the adapters have different base models, or runs with different precisions or "
                    "quantisations; name one with --model, --dtype or --quantization, or serve "
                    "them separately"
                )
        adapters = [s.adapter for s in sources.values() if s.adapter is not None]
        for first, other in pairwise(adapters):
            if other.settings != first.settings:
                raise CommandError(
                    f"the adapters in {first.directory} and {other.directory} differ in kind, "
                    "rank, scale or targets; serve them separately"
                )
        self._positions = trained_positions(next(iter(sources.values())).directory)
        self.waiting: list[Request] = []
        self._running: list[Request] = []
        self.broken = False  # whether a GPU kernel has failed, so that no request can be answered
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._resources = ExitStack()
        self._model: Any = None

    def __enter__(self) -> Self:
        self._open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopping = True
            for request in [*self.waiting, *self._running]:
                request.cancelled.set()
            self._changed.notify()
        self._thread.join()
        self._resources.close()

    def room(self, model: str, prompt_length: int) -> int:
        """Return the maximum number of tokens in the answer to a prompt.

        Raise ``CommandError`` if the prompt is too long here, for the model or for a block server.
        """
        source = self.sources[model]
        positions = min(self._positions, source.max_tokens) - source.columns_before
        longest = min(self.limits.max_prompt_length, source.max_prompt_length, int(positions) - 1)
        if not 1 <= prompt_length <= longest:
            raise CommandError(
                f"the prompt has {prompt_length} tokens; it must have 1 to {longest}"
            )
        return min(self.limits.max_new_tokens, int(positions) - prompt_length)

    def submit(self, request: Request) -> None:
        """Queue a request; raise `BusyError` if too many are waiting."""
        with self._changed:
            self.waiting = [r for r in self.waiting if not r.cancelled.is_set()]
            if len(self.waiting) >= self.limits.queue:
                raise BusyError(f"{len(self.waiting)} requests are waiting; try again later")
            self.waiting.append(request)
            self._changed.notify()

    def _open(self) -> None:
        # The first source with an adapter, so that the adapter's modules exist.
        source = max(self.sources.values(), key=lambda source: source.adapter is not None)
        self._model = self._resources.enter_context(opened(source))

    def _work(self) -> None:
        while batch := self._take():
            try:
                if self._model is None:
                    self._open()
                self._answer(batch)
            except Exception as error:
                # Without the error's text, which may quote a prompt.
                _log.warning("a batch failed: %s", type(error).__name__)
                for request in batch:
                    request.emit(self._described(error, batch[0]))
                if isinstance(self._model, LaneModel):  # open another lane for the next batch
                    self._close()
                elif is_broken():
                    self.broken = True
                    os.kill(os.getpid(), signal.SIGTERM)

    def _close(self) -> None:
        resources, self._resources, self._model = self._resources, ExitStack(), None
        with suppress(UserError, LaneError, OSError):  # the lane has failed already
            resources.close()

    def _described(self, error: Exception, request: Request) -> Exception:
        """Convert errors of a lane and of memory to texts for users."""
        invitation = self.sources[request.model].invitation
        if isinstance(error, LaneError) and invitation is not None:
            return explained(error, invitation)
        if isinstance(error, torch.OutOfMemoryError):
            return CommandError(memory_problem(error, "lower --batch-size or --max-new-tokens"))
        return error

    def _take(self) -> list[Request]:
        """Wait for requests; return those to answer together, or none when the thread must end."""
        with self._changed:
            while not self._stopping:
                self.waiting = [r for r in self.waiting if not r.cancelled.is_set()]
                if self.waiting:
                    batch = self._first_batch()
                    self.waiting = [r for r in self.waiting if r not in batch]
                    self._running = batch
                    return batch
                self._changed.wait()
        return []

    def _first_batch(self) -> list[Request]:
        first = self.waiting[0]
        source = self.sources[first.model]
        batch: list[Request] = []
        for request in self.waiting:
            together = [*batch, request]
            columns = max(len(r.prompt) for r in together) + max(r.max_tokens for r in together)
            fits = (columns + source.columns_before) * len(together) <= source.max_tokens
            if request is first or (fits and first.shares_batch_with(request)):
                batch.append(request)
            if len(batch) == self.limits.batch_size:
                break
        return batch

    def _answer(self, batch: Sequence[Request]) -> None:
        first, source = batch[0], self.sources[batch[0].model]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        tokens = pad([r.prompt for r in batch], padding_value=self.tokenizer.pad_token_id)
        ends = {*self._model.end_tokens, *end_marks(self.tokenizer)}
        following = Following(batch, self.tokenizer, ends, tokens.shape[1])
        set_seed(int.from_bytes(os.urandom(4)) if first.seed is None else first.seed)
        with ExitStack() as selected:
            self._select(source, selected)
            self._model.generate(
                tokens,
                pad([torch.ones_like(r.prompt) for r in batch]),
                max(r.max_tokens for r in batch),
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=sorted(ends) or None,
                logits_processor=[following.logits],
                stopping_criteria=[following],
                **sampling(first.temperature, first.top_p),
            )

    def _select(self, source: Source, selected: ExitStack) -> None:
        """Select the source's adapter or, within the context, none."""
        if isinstance(self._model, LaneModel):
            self._model.use(source.chosen, source.client_adapter)
        elif isinstance(self._model, WholeModel):
            if source.adapter is not None:
                load_adapter(self._model.peft_model, source.adapter.state)
            elif any(s.adapter is not None for s in self.sources.values()):
                selected.enter_context(self._model.without_adapter())


class _Logits:
    """Keeps the logits of the next tokens, before temperature and ``top_p``."""

    def __init__(self) -> None:
        self.latest = torch.empty(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.latest = scores
        return scores


class Following:
    """Emits the answers' texts during generation, and ends each at its own limits.

    If a lane was replaced, generation starts again with the same random numbers, and tokens that
    were already emitted are skipped.
    """

    def __init__(
        self, batch: Sequence[Request], tokenizer: Any, ends: set[int], columns: int
    ) -> None:
        self.logits = _Logits()
        self._columns = columns
        self._rows = [_Row(request, tokenizer, ends) for request in batch]

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Return (rows,) whether each answer is complete."""
        done = input_ids.shape[1] - self._columns
        latest = input_ids[:, -1].tolist()
        for index, row in enumerate(self._rows):
            if row.count < done and not row.over:
                row.add(latest[index], self.logits.latest[index])
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
        self._tokens: list[int] = []
        self._emitted = 0
        # Text that may be the beginning of a stop sequence is withheld.
        self._withheld = max((len(stop) - 1 for stop in request.stop), default=0)

    def add(self, token: int, logits: torch.Tensor) -> None:
        """Add a token, and emit the text that can no longer change."""
        self.count += 1
        if self.request.cancelled.is_set():
            self.over = True
            return
        ended = token in self._ends
        if not ended:
            self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        start = max(0, self._emitted - self._withheld)
        found = [i for stop in self.request.stop if (i := text.find(stop, start)) >= 0]
        reason = "length" if self.count == self.request.max_tokens else None
        if ended or found:
            reason = "stop"
        if found:
            text = text[: min(found)]
        elif reason is None:
            text = text[: max(0, len(text) - self._withheld)].rstrip(
                "\ufffd"
            )  # an incomplete character
        piece = Piece(text[self._emitted :], None if ended else token, finish_reason=reason)
        self._emitted = max(self._emitted, len(text))
        self.over = reason is not None
        if self.request.likeliest is not None and not ended:
            row = logits.float().log_softmax(-1)
            row = row.clamp_min(_LOWEST)
            values, tokens = row.topk(min(self.request.likeliest, len(row)))
            likeliest = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
            piece = replace(piece, log_probability=float(row[token]), likeliest=likeliest)
        self.request.emit(piece)
