"""Answer requests in one thread, in batches of requests for the same model."""

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from llguidance.hf import from_tokenizer

from chambers.endpoint.answer_stream import MIN_LOG_PROBABILITY, AnswerStream, Piece, Request
from chambers.endpoint.json_answers import Constraint
from chambers.errors import CommandError
from chambers.lane_model import LaneModel, explain_lane_error
from chambers.model_source import ModelSource
from chambers.models import NO_DRAFT, Draft, load_source
from finetuning.adapters.adapter import load_adapter
from finetuning.data.candidates import Continuation, candidate_batches
from finetuning.data.tokenization import end_marks
from finetuning.devices import is_broken, memory_problem
from finetuning.errors import UserError
from finetuning.evaluation.generation import sampling
from finetuning.model.positions import trained_positions
from finetuning.randomness import set_seed
from finetuning.whole_model import WholeModel
from split.protocol.errors import LaneError

BROKEN = "a GPU kernel has failed, so this process can no longer use the GPU"
_log = logging.getLogger(__name__)


class BusyError(RuntimeError):
    """Too many requests are waiting."""


@dataclass(frozen=True)
class AnswerLimits:
    """Limits of an endpoint."""

    batch_size: int  # number of requests that are answered together
    queue: int  # number of requests that may wait
    max_prompt_length: int  # in tokens
    max_new_tokens: int  # per answer
    draft: Draft = NO_DRAFT


class Answerer:
    """Answers requests for several models with the same base model.

    Use it as a context manager, which loads the model or opens a lane. ``sources`` are keyed by
    name. ``waiting`` contains the queued requests. Raise ``CommandError`` if base models differ, or
    adapters differ in kind, rank, scale or targets.
    """

    def __init__(
        self, sources: Mapping[str, ModelSource], tokenizer: Any, limits: AnswerLimits
    ) -> None:
        self.sources = sources
        self.tokenizer = tokenizer
        self.limits = limits
        if len({(source.directory, source.settings) for source in sources.values()}) > 1:
            raise CommandError(
                "the adapters were trained with different base models, precisions or "
                "quantisations; choose one with --model, --dtype or --quantization, or serve them "
                "separately"
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
        self.on_broken: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._resources = ExitStack()
        self._model: Any = None
        # Tokens in the form that grammars need, which takes about a second.
        self._grammar_tokens = functools.cache(partial(from_tokenizer, tokenizer))

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

    def max_new_tokens(self, model: str, prompt_length: int) -> int:
        """Return the maximum number of tokens in the answer to a prompt.

        Raise ``CommandError`` if the prompt is empty or exceeds a limit.
        """
        source = self.sources[model]
        positions = min(self._positions, source.max_tokens) - source.columns_before
        positions -= self.limits.draft.room
        longest = min(self.limits.max_prompt_length, source.max_prompt_length, int(positions) - 1)
        if not 1 <= prompt_length <= longest:
            raise CommandError(
                f"the prompt has {prompt_length} tokens; it must have 1 to {longest}"
            )
        return min(self.limits.max_new_tokens, int(positions) - prompt_length)

    def submit(self, *requests: Request) -> None:
        """Queue requests, all or none.

        Raise ``BusyError`` if too many are waiting, or ``CommandError`` if a GPU kernel has failed.
        """
        if self.broken:
            raise CommandError(BROKEN)
        with self._changed:
            self.waiting = [r for r in self.waiting if not r.cancelled.is_set()]
            if len(self.waiting) + len(requests) > self.limits.queue:
                raise BusyError(f"{len(self.waiting)} requests are waiting; try again later")
            self.waiting += requests
            self._changed.notify()

    def _open(self) -> None:
        # Prefer a source with an adapter, so that the adapter's modules exist.
        source = max(self.sources.values(), key=lambda source: source.adapter is not None)
        self._model = self._resources.enter_context(load_source(source))

    def _work(self) -> None:
        while batch := self._take():
            try:
                if self._model is None:
                    self._open()
                self._answer(batch)
            except Exception as error:
                # Omit the error's text, which may quote a prompt.
                _log.warning("a batch failed: %s", type(error).__name__)
                for request in batch:
                    request.emit(self._describe(error, batch[0]))
                if isinstance(self._model, LaneModel):  # open another lane for the next batch
                    self._model = None
                    with suppress(UserError, LaneError, OSError):  # the lane has failed already
                        self._resources.close()
                elif is_broken():
                    self.broken = True
                    self.on_broken()

    def _describe(self, error: Exception, request: Request) -> Exception:
        """Convert lane and out-of-memory errors to messages for users."""
        invitation = self.sources[request.model].invitation
        if isinstance(error, LaneError) and invitation is not None:
            return explain_lane_error(error, invitation)
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
        with ExitStack() as selected:
            self._select(self.sources[batch[0].model], selected)
            for request in batch:
                if request.echo is not None:
                    self._repeat_prompt(request)
                if not request.max_tokens:
                    request.emit(Piece("", finish_reason="length", of_prompt=True))
            if unfinished := [request for request in batch if request.max_tokens]:
                self._generate(unfinished)

    def _repeat_prompt(self, request: Request) -> None:
        """Emit the prompt and, if requested, the log-probabilities of its tokens."""
        first, *rest = request.prompt.tolist()
        request.emit(Piece(request.echo or "", of_prompt=True))
        if request.likeliest is None:
            return
        request.emit(Piece("", first, of_prompt=True))
        scored = Continuation(request.prompt[:1], request.prompt[1:])
        for batch in candidate_batches(
            [[scored]] if rest else [],
            padding=self.tokenizer.pad_token_id,
            columns_before=self._model.columns_before,
            max_tokens=self.sources[request.model].max_tokens,
        ):
            count = max(1, request.likeliest)
            values, tokens, best = self._model.log_probabilities(batch, count)
            best = best.clamp_min(MIN_LOG_PROBABILITY).tolist()
            for index, value in enumerate(values.clamp_min(MIN_LOG_PROBABILITY).tolist()):
                pairs = tuple(zip(tokens[index].tolist(), best[index], strict=True))
                pairs = pairs[: request.likeliest]
                request.emit(Piece("", rest[index], value, pairs, of_prompt=True))

    def _generate(self, batch: Sequence[Request]) -> None:
        first = batch[0]
        pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True, padding_side="left")
        tokens = pad([r.prompt for r in batch], padding_value=self.tokenizer.pad_token_id)
        ends = {*self._model.end_tokens, *end_marks(self.tokenizer)}
        stream = AnswerStream(batch, self.tokenizer, ends, tokens.shape[1])
        constraints = []
        if any(request.grammar for request in batch):
            of_grammars = partial(self._grammar_tokens, eos_token=tuple(sorted(ends)))
            constraints = [Constraint(batch, of_grammars, tokens.shape[1])]
        set_seed(int.from_bytes(os.urandom(4)) if first.seed is None else first.seed)
        self._model.generate(
            tokens,
            pad([torch.ones_like(r.prompt) for r in batch]),
            max(r.max_tokens for r in batch),
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=sorted(ends) or None,
            logits_processor=[*constraints, stream.keep_logits],
            stopping_criteria=[stream],
            **sampling(first.temperature, first.top_p),
            **(self.limits.draft.settings if len(batch) == 1 and not constraints else {}),
        )

    def _select(self, source: ModelSource, selected: ExitStack) -> None:
        """Select the source's adapter; if it has none, disable adapters within the context."""
        if isinstance(self._model, LaneModel):
            self._model.use(source)
        elif isinstance(self._model, WholeModel):
            if source.adapter is not None:
                load_adapter(self._model.peft_model, source.adapter.state)
            elif any(s.adapter is not None for s in self.sources.values()):
                selected.enter_context(self._model.without_adapter())
