"""The server's session for an evaluation: forward passes, generation and candidate answers."""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from finetuning.adapters.adapter import State, load_state
from finetuning.settings import AdapterSettings
from split.lane.lane import Lane
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.errors import LaneError
from split.protocol.evaluation import (
    CachedExtension,
    Evaluation,
    ForwardPass,
    ModelChoice,
    Prompts,
)
from split.protocol.frames import Frame, Kind
from split.server.body import StagedBody
from split.server.compute import ComputeThread, Job, Priority
from split.server.session import Session
from split.settings import SplitSettings

# Body adapters by name of the model; None for a model without adapters.
Models = Mapping[str, State | None]
_LONGEST_TOGETHER = 2048  # number of columns; longer texts gain little from a common pass
_ROWS_TOGETHER = 16  # of each session, because a common pass copies its adapter for each row


class EvaluationSession(Session):
    """Session of one client's evaluation. Each JOIN frame selects a model.

    The client may request independent forward passes, text generation for one batch of prompts at a
    time, or the computation of several endings for each text of a batch. The session caches the
    body's keys and values of the current batch, of at most ``max_cached_tokens`` padded tokens. The
    largest micro-batch has ``longest`` padded tokens; 0 allows only cached texts. See ``Session``
    for the other arguments.

    If several sessions wait for the next tokens of their texts, one pass computes them all.
    """

    def __init__(
        self,
        lane: Lane,
        models: Models,
        body: Part | StagedBody,
        adapter: AdapterSettings,
        compute: ComputeThread,
        split: SplitSettings,
        longest: int,
        max_cached_tokens: int,
        lifetime: float,
    ) -> None:
        super().__init__(lane, "evaluate", compute, split, lifetime)
        self._models = models
        self._body = body
        self._adapter = adapter
        prefixes = {
            name: 0 if state is None else adapter.columns_before for name, state in models.items()
        }
        self._evaluation = Evaluation(prefixes, split.window, longest, max_cached_tokens)
        self._credits = split.window
        self._has_texts = False
        # Used only by the compute thread: name of the selected model's adapter, key-value cache,
        # and the tokens that the cache takes from the activation budget.
        self._name: str | None = None
        self._key_values: KeyValues | None = None
        self._cached_tokens = 0
        self._answer: torch.Tensor | None = None  # computed together with other sessions' answers

    def serve(self) -> None:
        """Handle the client's frames until it ends the evaluation.

        Raise ``LaneError`` if the lane has ended, or the client was silent for too long. Raise
        ``ProtocolError`` if the client sent a frame that is not allowed.
        """
        handlers: dict[type, Callable[[Any], None]] = {
            ModelChoice: self._choose,
            ForwardPass: self._forward,
            Prompts: self._begin_texts,
            CachedExtension: self._continue_texts,
            Frame: lambda _: self._end_texts(),
        }
        try:
            while (event := self._evaluation.receive(self.receive())) is not None:
                handlers[type(event)](event)
            self.lane.send(Kind.END)
        finally:
            self.compute.withdraw(self)
            self.compute.call(self._free)
            self.compute.call(self._detach)
        with suppress(LaneError):  # wait until the client has received END and closes the lane
            self.receive()

    def holds(self) -> bool:
        """Return whether the session has keys and values in its cache."""
        return self._cached_tokens > 0

    def _choose(self, choice: ModelChoice) -> None:
        self._end_texts()
        if not choice.is_new:
            self._welcome()
            return
        state = self._models[choice.model]

        def choose() -> None:
            self._detach()
            if state is not None:
                self._name = f"evaluation {id(self)}"
                self._body.attach(self._adapter, self._name)
                load_state(self._body.trainable(self._name), state)
            self._evaluation.choosing = False
            self._welcome()

        # Use this priority so that the job does not overtake earlier prompts of other clients.
        self.put(Priority.FORWARD, choose)

    def _welcome(self) -> None:
        self.lane.send(Kind.WELCOME, fields={"credits": self._credits})

    def _forward(self, batch: ForwardPass) -> None:
        self._put(Priority.FORWARD, batch, lambda: self._body(batch.hidden, batch.padding))

    def _begin_texts(self, prompts: Prompts) -> None:
        self._end_texts()
        self._has_texts = True

        def begin() -> torch.Tensor:
            assert isinstance(self._body, Part)  # stages allow no ``max_cached_tokens``
            self._key_values = KeyValues(self._body, prompts.padding, prompts.hidden.shape[1])
            return self._key_values.extend(prompts.hidden)

        self._put(Priority.GENERATION, prompts, begin, tokens=prompts.tokens)

    def _continue_texts(self, extension: CachedExtension) -> None:
        rows, columns, _ = extension.hidden.shape
        is_small = columns == 1 and rows <= _ROWS_TOGETHER
        one_token = is_small and not (extension.endings or extension.drop)

        def extend() -> torch.Tensor:
            assert self._key_values is not None
            if one_token:
                return self._next_tokens(self._key_values, extension)
            if extension.endings:
                self._key_values.repeat(extension.endings)
            return self._key_values.extend(extension.hidden, extension.drop)

        # Use a high priority, because other generations may wait for this one's budget.
        self._put(Priority.BACKWARD, extension, extend, detail=extension if one_token else None)

    def _next_tokens(self, texts: KeyValues, extension: CachedExtension) -> torch.Tensor:
        """Compute one token of each row, together with the tokens that other sessions wait for."""
        if self._answer is not None:
            answer, self._answer = self._answer, None
            return answer
        assert isinstance(self._body, Part)
        began = time.perf_counter()
        lanes, seconds = self.compute.last_pass
        jobs = self.compute.take_with(lambda job: self._fits(job, texts), lanes - 1, seconds / 2)
        if not jobs:
            self.compute.last_pass = 1, 0.0
            return texts.extend(extension.hidden)
        started = time.perf_counter()
        others: list[Any] = [job.owner for job in jobs]
        sessions = [self, *others]
        given = [extension.hidden, *(job.detail.hidden for job in jobs)]
        try:
            with self._body.using_together([s._name for s in sessions], [len(g) for g in given]):
                answers = KeyValues.extend_together([s._key_values for s in sessions], given)
        except Exception:  # such as out of memory: run each job alone to isolate the error
            self.compute.last_pass = 1, 0.0
            for job in jobs:
                self.compute.run(job)
            self._body.use(self._name)
            return texts.extend(extension.hidden)
        seconds = time.perf_counter() - started
        self.compute.last_pass = len(sessions), seconds
        # Each job is charged for its share, although the first one has computed the others' too.
        self.account.seconds_computing -= time.perf_counter() - began
        for session, rows in zip(sessions, given, strict=True):
            session.account.seconds_computing += seconds * len(rows) / sum(map(len, given))
        for job, other, answer in zip(jobs, others, answers[1:], strict=True):
            other._answer = answer
            self.compute.run(job)
        return answers[0]

    def _fits(self, job: Job, texts: KeyValues) -> bool:
        """Return whether a job can share a pass with these texts, without too much padding."""
        if not isinstance(job.owner, EvaluationSession) or job.owner._key_values is None:
            return False
        lengths = texts.length, job.owner._key_values.length
        return texts.can_join and max(lengths) <= min(2 * min(lengths) + 32, _LONGEST_TOGETHER)

    def _end_texts(self) -> None:
        if self._has_texts:
            self._has_texts = False
            self._kept_in_step = 0.0
            self.put(Priority.CLEANUP, self._free)

    def _put(
        self,
        priority: Priority,
        batch: ForwardPass | Prompts | CachedExtension,
        compute: Callable[[], torch.Tensor],
        tokens: int = 0,
        detail: object = None,
    ) -> None:
        """Queue a job that computes a forward pass with the selected model and sends the answer."""

        @torch.no_grad()
        def forward() -> None:
            self._cached_tokens += tokens  # first, so that they are released even after an error
            self._body.use(self._name)
            self._body.train(False)
            output = compute()
            self.account.tokens += output.shape[0] * output.shape[1]
            self._evaluation.answered += 1
            self.answer(batch.step, batch.index, output)

        self.put(priority, forward, tokens, detail)

    def _free(self) -> None:
        self._key_values = None
        self.compute.release(self._cached_tokens)
        self._cached_tokens = 0

    def _detach(self) -> None:
        if self._name is not None:
            self._body.remove(self._name)
            self._name = None
