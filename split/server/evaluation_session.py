"""One client's evaluation at the block server: forward passes, generation, candidate answers."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from finetuning.adapters.adapter import State, load_state
from finetuning.settings import AdapterSettings
from split.lane.lane import Lane
from split.model.key_values import KeyValues
from split.model.part import Part
from split.protocol.errors import LaneError, ProtocolError
from split.protocol.frames import Frame, Kind, Padding, check_size, hidden_of, whole_number
from split.server.compute import ComputeThread, Priority
from split.server.session import Session

# The body's adapters by the name of the model; None is the body without any.
Models = Mapping[str, State | None]


class EvaluationSession(Session):
    """Serves one client's evaluation; each JOIN frame chooses a model.

    Besides independent forward passes the client may request generation, one batch of prompts at a
    time, or the computation of several endings of each text of a batch. The session keeps the
    body's keys and values of the batch.

    Args:
        lane: Lane to the client; the handshake is over.
        models: Adapters of the models that the client may choose.
        body: The frozen blocks.
        adapter: Kind, rank, scale and targets, or prefix length.
        compute: Runs the session's jobs.
        window: Maximum number of micro-batches in flight.
        longest: Padded tokens of the largest micro-batch, prefixes included; 0 allows only
            generation.
        max_cached_tokens: Padded tokens whose keys and values may be cached at once, with prefixes.
        frame_timeout: Seconds to wait for the client's next frame.
        gather_timeout: Seconds to wait for it if others wait for room that the client holds.
        lifetime: Seconds from its invitation to the end of the phase of the round.

    """

    def __init__(
        self,
        lane: Lane,
        models: Models,
        body: Part,
        adapter: AdapterSettings,
        compute: ComputeThread,
        window: int,
        longest: int,
        max_cached_tokens: int,
        frame_timeout: float,
        gather_timeout: float,
        lifetime: float,
    ) -> None:
        super().__init__(
            lane=lane,
            purpose="evaluate",
            compute=compute,
            frame_timeout=frame_timeout,
            gather_timeout=gather_timeout,
            lifetime=lifetime,
        )
        self._models = models
        self._body = body
        self._adapter = adapter
        self._window = window
        self._chosen: str | None = None  # the client's name for the model
        self._name: str | None = None
        self._columns_before = 0  # columns of the chosen model's prefix
        self._longest = longest
        self._max_cached_tokens = max_cached_tokens
        self._received = self._computed = 0  # micro-batches
        self._generation: _Generation | None = None
        # Used by the compute thread alone: keys and values, and the budget tokens that they take.
        self._key_values: KeyValues | None = None
        self._kept = 0
        self._choosing = False

    def serve(self) -> None:
        """Answer frames until the client ends the evaluation.

        Raises:
            LaneError: The lane has ended, or the client was silent for too long.
            ProtocolError: The client sent something that it may not send now.

        """
        try:
            while (frame := self.receive()).kind is not Kind.END:
                if frame.kind is Kind.JOIN:
                    self._choose(frame)
                elif frame.kind is Kind.HIDDEN and self._chosen is not None:
                    self._take_hidden(frame)
                elif frame.kind is Kind.STEP and self._generation is not None:
                    self._end_generation()
                else:
                    raise ProtocolError(f"a frame {frame.kind.name} came in an evaluation")
            self.lane.send(Kind.END)
        finally:
            self.compute.withdraw(self)
            self.compute.call(self._forget)
            self.compute.call(self._detach)
        with suppress(LaneError):  # until the client has the end
            self.receive()

    def holds(self) -> bool:
        """Whether keys and values of a generation exist."""
        return self._kept > 0

    def _choose(self, frame: Frame) -> None:
        model = frame.fields.get("model")
        if not isinstance(model, str) or model not in self._models:
            raise ProtocolError(
                f"the model {model!r} isn't among those to evaluate: {', '.join(self._models)}"
            )
        if self._choosing or self._received > self._computed:
            raise ProtocolError("another model was chosen before the answers to the last one")
        state = self._models[model]
        self._end_generation()
        if model == self._chosen:
            self._welcome()
            return
        self._chosen = model
        self._columns_before = 0 if state is None else self._adapter.columns_before
        self._choosing = True

        def choose() -> None:
            self._detach()
            if state is not None:
                self._name = f"evaluation {id(self)}"
                self._body.attach(self._adapter, self._name)
                load_state(self._body.trainable(self._name), state)
            self._choosing = False
            self._welcome()

        # Not before other clients' prompts, which came earlier.
        self.put(Priority.FORWARD, choose)

    def _welcome(self) -> None:
        self.lane.send(Kind.WELCOME, fields={"credits": self._window})

    def _take_hidden(self, frame: Frame) -> None:
        hidden, padding = hidden_of(frame)
        check_size(hidden, "hidden")
        if "new_tokens" in frame.fields:
            self._begin_generation(frame, hidden, padding)
            return
        if "endings" in frame.fields:
            self._compute_endings(frame, hidden, padding)
            return
        if self._generation is not None:
            self._continue_generation(frame, hidden)
            return
        self._received += 1
        if self._received - self._computed > self._window:
            raise ProtocolError(f"more than {self._window} micro-batches are in flight")
        tokens = self._budget_tokens(hidden, 0)
        if tokens > self._longest:
            raise ProtocolError(f"{tokens} padded tokens came; {self._longest} were agreed")
        self._put(Priority.FORWARD, frame, lambda: self._body(hidden, padding))

    def _begin_generation(self, frame: Frame, hidden: torch.Tensor, padding: Padding) -> None:
        self._end_generation()
        rows, columns = hidden.shape[:2]
        new_tokens = whole_number(frame, "new_tokens")
        if padding.side != "left" or frame.micro_batch or not new_tokens:
            raise ProtocolError(
                f"a generation of {new_tokens} tokens began with number {frame.micro_batch}, and "
                f"padding on the {padding.side}"
            )
        tokens = self._budget_tokens(hidden, new_tokens)
        if tokens > self._max_cached_tokens:
            raise ProtocolError(
                f"{rows} texts of {columns} + {new_tokens} tokens were requested, with a prefix of "
                f"{self._columns_before}; agreed on are at most {self._max_cached_tokens} tokens "
                "together (evaluate.generate, evaluate.batch-size, data.max-length, "
                "evaluate.max-new-tokens, adapter.prefix-length)"
            )
        self._generation = _Generation(rows=rows, columns=columns, new_tokens=new_tokens)
        self._received += 1

        def begin() -> torch.Tensor:
            self._kept = tokens
            self._key_values = KeyValues(self._body, padding, columns)
            return self._key_values.extend(hidden)

        self._put(priority=Priority.GENERATION, frame=frame, compute=begin, tokens=tokens)

    def _continue_generation(self, frame: Frame, hidden: torch.Tensor) -> None:
        generation = self._generation
        assert generation is not None
        self._refuse_if_under_way("the next token")
        if hidden.shape[:2] != (generation.rows, 1) or frame.micro_batch != generation.received:
            raise ProtocolError(
                f"{hidden.shape[0]} × {hidden.shape[1]} tokens came as number {frame.micro_batch}; "
                f"{generation.rows} × 1 were due as number {generation.received}"
            )
        if generation.received == generation.new_tokens:
            raise ProtocolError(f"more than the agreed {generation.new_tokens} tokens came")
        generation.received += 1
        self._received += 1

        def extend() -> torch.Tensor:
            assert self._key_values is not None
            return self._key_values.extend(hidden)

        # Generations that wait for room may be waiting for the end of this one.
        self._put(Priority.BACKWARD, frame, extend)

    def _compute_endings(self, frame: Frame, hidden: torch.Tensor, padding: Padding) -> None:
        """Compute several endings of each row, all that follows the prompts' frame."""
        generation = self._generation
        if generation is None:
            raise ProtocolError("endings came without the texts that they end")
        self._refuse_if_under_way("endings")
        each, (rows, columns) = whole_number(frame, "endings"), hidden.shape[:2]
        if (
            (generation.received, frame.micro_batch, padding.side) != (1, 1, "right")
            or not each
            or rows != generation.rows * each
        ):
            raise ProtocolError(
                f"{rows} rows came as {each} endings of {generation.rows} texts, with number "
                f"{frame.micro_batch} and padding on the {padding.side}, after "
                f"{generation.received} frames of these texts"
            )
        tokens = rows * (self._columns_before + generation.columns + columns)
        room = generation.rows * (self._columns_before + generation.columns + generation.new_tokens)
        if tokens > room:
            raise ProtocolError(f"endings take {tokens} tokens; {room} were agreed")
        # Nothing may follow.
        generation.received = generation.new_tokens = max(generation.new_tokens, 2)
        self._received += 1

        def extend() -> torch.Tensor:
            assert self._key_values is not None
            self._key_values.repeat(each)
            return self._key_values.extend(hidden)

        self._put(Priority.BACKWARD, frame, extend)

    def _end_generation(self) -> None:
        self._refuse_if_under_way("the end of a generation, or another one,")
        if self._generation is not None:
            self._generation = None
            self._kept_in_step = 0.0
            self.put(Priority.CLEANUP, self._forget)

    def _budget_tokens(self, hidden: torch.Tensor, new_tokens: int) -> int:
        """Return the padded tokens of a micro-batch, prefixes and new tokens included."""
        rows, columns = hidden.shape[:2]
        return rows * (self._columns_before + columns + new_tokens)

    def _refuse_if_under_way(self, what: str) -> None:
        if self._received != self._computed:
            raise ProtocolError(f"{what} came while a micro-batch is in flight")

    def _put(
        self,
        priority: Priority,
        frame: Frame,
        compute: Callable[[], torch.Tensor],
        tokens: int = 0,
    ) -> None:
        """Queue a forward pass with the chosen model, and its answer."""
        step, index = frame.step, frame.micro_batch

        @torch.no_grad()
        def forward() -> None:
            self._body.use(self._name)
            self._body.train(False)
            output = compute()
            self.account.tokens += output.shape[0] * output.shape[1]
            self._computed += 1
            self.lane.send(Kind.HIDDEN, step=step, micro_batch=index, tensors={"hidden": output})

        self.put(priority, forward, tokens)

    def _forget(self) -> None:
        self._key_values = None
        self.compute.release(self._kept)
        self._kept = 0

    def _detach(self) -> None:
        if self._name is not None:
            self._body.remove(self._name)
            self._name = None


@dataclass
class _Generation:
    """A batch of texts that is being generated.

    Attributes:
        rows: Number of texts.
        columns: Number of columns of the prompts.
        new_tokens: Maximum number of new tokens of each text.
        received: Number of frames received; the prompts' frame yields the first new token.

    """

    rows: int
    columns: int
    new_tokens: int
    received: int = 1
