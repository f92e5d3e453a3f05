"""Requests and replies in the form of OpenAI's API; unknown parameters are ignored."""

import time
import uuid
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from chambers.endpoint.answer_stream import Piece

_LARGEST_SEED = 2**63 - 1
_MAX_LIKELIEST = 20


class TextPart(BaseModel):
    """A part of a message; images and audio are refused."""

    type: Literal["text"]
    text: str


class Turn(BaseModel):
    """A message of a conversation."""

    role: str
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The text of all parts."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class Parameters(BaseModel):
    """Parameters of both kinds of requests; values that need unsupported features are refused."""

    model_config = ConfigDict(strict=True)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-_LARGEST_SEED, le=_LARGEST_SEED)
    stop: Annotated[list[str], Field(max_length=4)] | str | None = None  # checked per token
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Literal[1] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    logit_bias: dict[str, Any] | None = Field(None, max_length=0)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)


class Chat(Parameters):
    """A request for the next message of a conversation."""

    messages: list[Turn] = Field(min_length=1)
    max_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("max_completion_tokens", "max_tokens")
    )
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=_MAX_LIKELIEST)
    tools: list[Any] | None = Field(None, max_length=0)
    functions: list[Any] | None = Field(None, max_length=0)
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    @property
    def likeliest(self) -> int | None:
        """Number of likely alternatives per token; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class Completion(Parameters):
    """A request for the continuation of a text."""

    prompt: str = Field(min_length=1)
    logprobs: int | None = Field(None, ge=0, le=_MAX_LIKELIEST)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None

    @property
    def likeliest(self) -> int | None:
        """Number of likely alternatives per token; None without log-probabilities."""
        return self.logprobs


class CompletionReply:
    """The continuation of a text, built from the pieces of an answer."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Any, prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._pieces: list[Piece] = []
        self._characters = 0  # of the tokens whose log-probabilities have been returned
        self._about = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def add(self, piece: Piece) -> None:
        """Add a piece of the answer."""
        self._pieces.append(piece)

    def whole(self) -> dict[str, Any]:
        """Return the complete reply, once the last piece has been added."""
        text = "".join(piece.text for piece in self._pieces)
        choice = self._content(text) | self._end(self._pieces, self._pieces[-1].finish_reason)
        return self._about | {"object": self.kind, "choices": [choice], "usage": self._usage()}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """Add a piece, and return its chunk."""
        first = not self._pieces
        self.add(piece)
        choice = self._delta(piece.text, first) | self._end([piece], piece.finish_reason)
        return self._about | {"object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk with the numbers of tokens, which follows the last piece."""
        return self._about | {"object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def _end(self, pieces: list[Piece], reason: str | None) -> dict[str, Any]:
        known = [p for p in pieces if p.token is not None and p.log_probability is not None]
        logprobs = self._logprobs(known) if known else None
        return {"index": 0, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        # The token that ends an answer was generated too.
        given, new = self._prompt_tokens, len(self._pieces)
        return {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}

    def _token(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _content(self, text: str) -> dict[str, Any]:
        """Return the answer's text in a whole reply."""
        return {"text": text}

    def _delta(self, text: str, first: bool) -> dict[str, Any]:
        """Return a piece's text in a chunk."""
        return {"text": text}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        texts = [self._token(piece.token or 0) for piece in pieces]
        ends = [*accumulate(map(len, texts), initial=self._characters)]
        self._characters = ends[-1]
        return {
            "tokens": texts,
            "token_logprobs": [piece.log_probability for piece in pieces],
            "top_logprobs": [
                {self._token(token): value for token, value in piece.likeliest} for piece in pieces
            ],
            "text_offset": ends[:-1],
        }


class ChatReply(CompletionReply):
    """The next message of a conversation."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": text}}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any]:
        return {
            "content": [
                self._alternative(piece.token or 0, piece.log_probability or 0.0)
                | {"top_logprobs": [self._alternative(*each) for each in piece.likeliest]}
                for piece in pieces
            ]
        }

    def _alternative(self, token: int, log_probability: float) -> dict[str, Any]:
        text = self._token(token)
        content = None if "\ufffd" in text else [*text.encode()]  # U+FFFD: part of a character
        return {"token": text, "logprob": log_probability, "bytes": content}
