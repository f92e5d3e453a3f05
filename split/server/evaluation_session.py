"""The server's session for an evaluation: forward passes, generation and candidate answers."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from finetuning.adapters.adapter import State, load_state
from split.lane.lane import Lane
from split.protocol.errors import LaneError
from split.protocol.evaluation import CachedExtension, Evaluation, ForwardPass, ModelChoice, Prompts
from split.protocol.frames import Frame, Kind
from split.server.compute import Priority
from split.server.generation_batch import CachedTexts, GenerationBatch, NextTokens, is_next_tokens
from split.server.session import Session
from split.settings import SplitSettings

# Body adapters by name of the model; None for a model without adapters.
Models = Mapping[str, State | None]


class EvaluationSession(Session):
    """Session of one client's evaluation. Each JOIN frame selects a model.

    The client may request independent forward passes, text generation for one batch of prompts at a
    time, or the computation of several endings for each text of a batch. The session caches the
    body's keys and values of the current batch, of at most ``max_cached_tokens`` padded tokens. The
    largest micro-batch has ``max_batch_tokens`` padded tokens; 0 allows only cached texts. See
    ``Session`` for the other arguments.

    If several sessions with the same ``generation`` wait for the next tokens of their texts, one
    pass computes them all.
    """

    def __init__(
        self,
        lane: Lane,
        models: Models,
        generation: GenerationBatch,
        split: SplitSettings,
        max_batch_tokens: int,
        max_cached_tokens: int,
        lifetime: float,
    ) -> None:
        super().__init__(lane, "evaluate", generation.compute, split, lifetime)
        self._models = models
        self._body = generation.body
        self._generation = generation
        columns = generation.adapter.columns_before
        prefixes = {name: 0 if state is None else columns for name, state in models.items()}
        self._evaluation = Evaluation(prefixes, split.window, max_batch_tokens, max_cached_tokens)
        self._credits = split.window
        self._has_texts = False
        # Used only by the compute thread: name of the selected model's adapter, and cached texts.
        self._name: str | None = None
        self._texts: CachedTexts | None = None

    def serve(self) -> None:
        """Handle the client's frames until it ends the evaluation.

        Raise ``LaneError`` if the lane has ended, or the client was silent for too long. Raise
        ``ProtocolError`` if the client sent a frame that is not allowed.
        """
        handlers: dict[type, Callable[[Any], None]] = {
            ModelChoice: self._choose,
            ForwardPass: self._queue_forward_pass,
            Prompts: self._queue_prompts,
            CachedExtension: self._queue_extension,
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

    def _choose(self, choice: ModelChoice) -> None:
        self._end_texts()
        if not choice.is_new:
            self._welcome()
            return
        # Use this priority so that the job does not overtake earlier prompts of other clients.
        self.put(Priority.FORWARD, partial(self._attach, self._models[choice.model]))

    def _attach(self, state: State | None) -> None:
        self._detach()
        if state is not None:
            self._name = f"evaluation {id(self)}"
            self._body.attach(self._generation.adapter, self._name)
            load_state(self._body.trainable(self._name), state)
        self._evaluation.choosing = False
        self._welcome()

    def _welcome(self) -> None:
        self.lane.send(Kind.WELCOME, fields={"credits": self._credits})

    def _queue_forward_pass(self, batch: ForwardPass) -> None:
        self.put(Priority.FORWARD, partial(self._start, batch))

    @torch.no_grad()
    def _start(self, batch: ForwardPass) -> None:
        self._body.use(self._name)
        self._body.train(False)
        started = self._body.start(batch.hidden, batch.padding)
        self.passes.when_complete(started, lambda computed: self._answer(batch, computed.output))

    def _queue_prompts(self, prompts: Prompts) -> None:
        self._end_texts()
        self._has_texts = True
        self.put(Priority.FORWARD, partial(self._begin_texts, prompts), prompts.tokens)

    def _begin_texts(self, prompts: Prompts) -> None:
        self.passes.held += prompts.tokens  # first, so that they are released after an error
        self._compute(prompts, partial(self._cache_prompts, prompts))

    def _cache_prompts(self, prompts: Prompts) -> torch.Tensor:
        self._texts, output = self._generation.begin(prompts, self._name, self.account)
        return output

    def _queue_extension(self, extension: CachedExtension) -> None:
        assert self._texts is not None  # the prompts have been answered
        request = None
        if is_next_tokens(extension):
            request = NextTokens(self._texts, extension.hidden)
            compute = partial(self._generation.next_tokens, request)
        else:
            compute = partial(self._generation.extend, self._texts, extension)
        # Use a high priority, because other generations may wait for this one's budget.
        work = partial(self._compute, extension, compute)
        self.put(Priority.BACKWARD, work, detail=request)

    def _end_texts(self) -> None:
        if self._has_texts:
            self._has_texts = False
            self._kept_in_step = 0.0
            self.put(Priority.CLEANUP, self._free)

    @torch.no_grad()
    def _compute(
        self, batch: Prompts | CachedExtension, compute: Callable[[], torch.Tensor]
    ) -> None:
        """Compute hidden states with the selected model, and send them; runs as a job."""
        self._body.use(self._name)
        self._body.train(False)
        self._answer(batch, compute())

    def _answer(self, batch: ForwardPass | Prompts | CachedExtension, output: torch.Tensor) -> None:
        self.account.tokens += output.shape[0] * output.shape[1]
        self._evaluation.answered += 1
        self.answer(batch.step, batch.index, output)

    def _free(self) -> None:
        if self._texts is not None:
            self._texts.key_values.free()
        self._texts = None
        self.passes.release(self.passes.held)

    def _detach(self) -> None:
        if self._name is not None:
            self._body.remove(self._name)
            self._name = None
