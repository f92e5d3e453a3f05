"""The server's state machine that converts the frames of a client's evaluation into events.

The client selects one of the models and sends hidden states, either of independent micro-batches or
of texts whose keys and values the server caches. Cached texts are continued token by token, or with
several endings each. Frames that are not allowed in the current state raise ``ProtocolError``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from split.protocol.errors import ProtocolError
from split.protocol.frames import Frame, Kind, Padding, read_hidden, read_whole_number


@dataclass(frozen=True)
class ModelChoice:
    """The client has selected a model; ``is_new`` is False if it was already selected."""

    model: str
    is_new: bool


@dataclass(frozen=True)
class ForwardPass:
    """An independent micro-batch with hidden states of shape (rows, columns, hidden)."""

    step: int
    index: int
    hidden: torch.Tensor
    padding: Padding


@dataclass(frozen=True)
class Prompts(ForwardPass):
    """Hidden states of prompts, whose keys and values are cached."""

    tokens: int  # padded tokens to reserve in the cache, prefixes and new tokens included


@dataclass(frozen=True)
class CachedExtension:
    """Hidden states of the next tokens of each cached text, or of several endings of each text.

    For the next tokens, ``endings`` is 0, the shape is (rows, columns, hidden), and the last
    ``drop`` tokens of the previous frame are first removed from the cache; otherwise the shape is
    (rows × endings, columns, hidden). The index is counted from the prompts, which have index 0.
    """

    step: int
    index: int
    hidden: torch.Tensor
    endings: int = 0
    drop: int = 0


# A STEP frame means that the client no longer needs the cached texts.
EvaluationEvent = ModelChoice | ForwardPass | Prompts | CachedExtension | Frame


class Evaluation:
    """State machine that checks a client's frames. Don't call ``receive`` concurrently.

    ``columns_before`` maps the names of the models that the client may select to their prefix
    lengths. At most ``window`` micro-batches may be in flight. A micro-batch has at most
    ``max_batch_tokens`` padded tokens (0 allows only cached texts), and a batch of cached texts has
    at most ``max_cached_tokens``, including new tokens. Both include prefixes.
    """

    def __init__(
        self,
        columns_before: Mapping[str, int],
        window: int,
        max_batch_tokens: int,
        max_cached_tokens: int,
    ) -> None:
        # Any thread may change these two attributes.
        self.choosing = False  # whether a selected model is not ready yet
        self.answered = 0  # number of micro-batches whose output was sent
        self._models = columns_before
        self._window = window
        self._max_batch_tokens = max_batch_tokens
        self._max_cached_tokens = max_cached_tokens
        self._model: str | None = None  # the selected model; None until the first JOIN
        self._prefix = 0  # prefix length of the selected model
        self._received = 0
        # Numbers of rows and columns of the prompts, of columns in the cache and in the last frame,
        # of new tokens, and of frames so far (0 without cached texts).
        self._rows = self._columns = self._cached = self._last = 0
        self._new_tokens = self._frames = 0
        self._complete = False  # whether endings have completed the cached texts

    def receive(self, frame: Frame) -> EvaluationEvent | None:
        """Check the next frame; return its event, or None for ``END``.

        Raise a ProtocolError if the frame is not allowed now, or contradicts earlier frames.
        """
        if frame.kind is Kind.END:
            return None
        if frame.kind is Kind.JOIN:
            return self._choice(frame)
        if frame.kind is Kind.HIDDEN and self._model is not None:
            return self._hidden(frame)
        if frame.kind is Kind.STEP and self._frames:
            self._refuse_in_flight("the end of a generation")
            self._frames = 0
            return frame
        raise ProtocolError(f"a {frame.kind.name} frame is not allowed now in an evaluation")

    def _choice(self, frame: Frame) -> ModelChoice:
        model = frame.fields.get("model")
        if not isinstance(model, str) or model not in self._models:
            raise ProtocolError(
                f"{model!r} is not one of the models to evaluate: {', '.join(self._models)}"
            )
        if self.choosing or self._received > self.answered:
            raise ProtocolError("a model was chosen before all answers of the last model were sent")
        self.choosing = model != self._model
        self._model, self._prefix, self._frames = model, self._models[model], 0
        return ModelChoice(model, is_new=self.choosing)

    def _hidden(self, frame: Frame) -> EvaluationEvent:
        hidden, padding = read_hidden(frame)
        if "new_tokens" in frame.fields:
            event: EvaluationEvent = self._prompts(frame, hidden, padding)
        elif "endings" in frame.fields:
            event = self._endings(frame, hidden, padding)
        elif not self._frames:
            event = self._forward_pass(frame, hidden, padding)
        else:
            event = self._next_tokens(frame, hidden)
        self._received += 1
        return event

    def _forward_pass(self, frame: Frame, hidden: torch.Tensor, padding: Padding) -> ForwardPass:
        if self._received - self.answered >= self._window:
            raise ProtocolError(f"more than {self._window} micro-batches are in flight")
        tokens = self._tokens(*hidden.shape[:2])
        if tokens > self._max_batch_tokens:
            raise ProtocolError(
                f"received {tokens} padded tokens; at most {self._max_batch_tokens} were agreed on"
            )
        return ForwardPass(frame.step, frame.micro_batch, hidden, padding)

    def _prompts(self, frame: Frame, hidden: torch.Tensor, padding: Padding) -> Prompts:
        self._refuse_in_flight("another generation")
        rows, columns = hidden.shape[:2]
        new_tokens = read_whole_number(frame, "new_tokens")
        if padding.side != "left" or frame.micro_batch or not new_tokens:
            raise ProtocolError(
                f"received {new_tokens} new tokens, micro-batch {frame.micro_batch} and padding on "
                f"the {padding.side}; expected at least 1 token, micro-batch 0 and left padding"
            )
        tokens = self._tokens(rows, columns + new_tokens)
        if tokens > self._max_cached_tokens:
            raise ProtocolError(
                f"{rows} texts of {columns} + {new_tokens} tokens were requested, with a prefix of "
                f"{self._prefix}; at most {self._max_cached_tokens} tokens in total were agreed on "
                "(evaluate.generate, evaluate.batch-size, data.max-length, "
                "evaluate.max-new-tokens, adapter.prefix-length)"
            )
        self._rows, self._columns, self._new_tokens, self._frames = rows, columns, new_tokens, 1
        self._cached, self._last, self._complete = columns, columns, False
        return Prompts(frame.step, frame.micro_batch, hidden, padding, tokens)

    def _next_tokens(self, frame: Frame, hidden: torch.Tensor) -> CachedExtension:
        self._refuse_in_flight("the next tokens")
        rows, columns = hidden.shape[:2]
        drop = read_whole_number(frame, "drop") if "drop" in frame.fields else 0
        if (rows, frame.micro_batch) != (self._rows, self._frames) or drop >= self._last:
            raise ProtocolError(
                f"received {rows} rows as micro-batch {frame.micro_batch}, and {drop} tokens to "
                f"drop; expected {self._rows} rows as micro-batch {self._frames}, and fewer than "
                f"{self._last} tokens to drop"
            )
        self._cached, self._last = self._cached - drop + columns, columns
        if self._complete or self._cached > self._columns + self._new_tokens:
            raise ProtocolError(f"received more than the agreed {self._new_tokens} tokens")
        self._frames += 1
        return CachedExtension(frame.step, frame.micro_batch, hidden, drop=drop)

    def _endings(self, frame: Frame, hidden: torch.Tensor, padding: Padding) -> CachedExtension:
        if not self._frames:
            raise ProtocolError("received endings without their beginnings")
        self._refuse_in_flight("endings")
        each, (rows, columns) = read_whole_number(frame, "endings"), hidden.shape[:2]
        if (
            (self._frames, frame.micro_batch, padding.side) != (1, 1, "right")
            or not each
            or rows != self._rows * each
        ):
            raise ProtocolError(
                f"received {rows} rows as {each} endings of each of {self._rows} texts, as "
                f"micro-batch {frame.micro_batch} with padding on the {padding.side}, after "
                f"{self._frames} frames; expected micro-batch 1, right padding and 1 frame"
            )
        tokens = self._tokens(rows, self._columns + columns)
        room = self._tokens(self._rows, self._columns + self._new_tokens)
        if tokens > room:
            raise ProtocolError(f"endings need {tokens} tokens; at most {room} were agreed on")
        self._frames += 1
        self._complete = True
        return CachedExtension(frame.step, frame.micro_batch, hidden, endings=each)

    def _tokens(self, rows: int, columns: int) -> int:
        """Return the number of padded tokens, prefixes included."""
        return rows * (self._prefix + columns)

    def _refuse_in_flight(self, what: str) -> None:
        if self._received != self.answered:
            raise ProtocolError(f"received {what} while a micro-batch is in flight")
