"""Requests and replies in the form of OpenAI's API; unknown parameters are refused."""

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from chambers.endpoint.answer_stream import Piece
from chambers.endpoint.json_answers import grammar_of

_LARGEST_SEED = 2**63 - 1
_MAX_LIKELIEST = 20
# Parameters that are not supported, and the values for which the answer doesn't depend on them.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **{"tools": ([],), "functions": ([],), "n": (1,), "best_of": (1,), "suffix": ("",)},
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **{"top_k": (0, -1), "repetition_penalty": (1,)},
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_p"), (0,)),
    **{"modalities": (["text"],), "logit_bias": ({},)},
}


def _refuse_unsupported(value: Any) -> Any:
    """Leave out parameters that aren't supported; raise an error if the answer depends on them."""
    items = value.items() if isinstance(value, dict) else ()
    kept = {name: each for name, each in items if each is not None}
    for name in kept.keys() & _UNSUPPORTED:
        if kept.pop(name) not in _UNSUPPORTED[name]:
            reason = f"'{name}' is not supported by this endpoint; leave it out"
            raise PydanticCustomError("unsupported", "{reason}", {"name": name, "reason": reason})
    if "max_completion_tokens" in kept:
        kept["max_tokens"] = kept.pop("max_completion_tokens")
    return kept


def _as_list(value: Any) -> Any:
    """Put a single text, or a single list of tokens, into a list."""
    is_one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    return [value] if is_one else value


def _text(content: Any) -> Any:
    """Join the parts of a message's text; raise an error if there are images or sound."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        raise PydanticCustomError("unsupported", "Messages can only contain text")
    return "".join(part["text"] for part in content)


def _no_tools(calls: Any) -> None:
    if calls:
        raise PydanticCustomError("unsupported", "Tools are not supported by this endpoint")


class _Form(BaseModel):
    """A part of a request: null counts as absent, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")
    unused: ClassVar[tuple[str, ...]] = ()  # keys that never affect the answer

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: each for k, each in value.items() if each is not None and k not in cls.unused}


class Turn(_Form):
    """A message of a conversation."""

    unused = ("annotations", "name", "refusal")
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: Annotated[None, BeforeValidator(_no_tools)] = None

    @property
    def in_template(self) -> dict[str, str]:
        """The message in the format of chat templates."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content}


class StreamOptions(_Form):
    """Options of a streamed answer."""

    unused = ("include_obfuscation",)
    include_usage: bool = False


class JsonSchema(_Form):
    """A JSON schema."""

    unused = ("description", "name", "strict")
    content: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Form):
    """The form of an answer; objects without a schema are constrained to be JSON."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    _grammar: str = PrivateAttr("")

    @model_validator(mode="after")
    def _set_grammar(self) -> Self:
        if self.type == "json_object":
            self._grammar = grammar_of({"type": "object"})
        elif self.type == "json_schema":
            if self.json_schema is None:
                raise ValueError("it has the type json_schema, but no json_schema")
            self._grammar = grammar_of(self.json_schema.content)
        return self

    @property
    def grammar(self) -> str:
        """The grammar of the answer; empty if any text is allowed."""
        return self._grammar


class Parameters(_Form):
    """Parameters of both kinds of requests."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
    unused = (
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "service_tier", "store", "user"),
    )

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-_LARGEST_SEED, le=_LARGEST_SEED)
    # Each is searched for after every token.
    stop: Annotated[list[str], BeforeValidator(_as_list), Field(max_length=4)] = []
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()

    _refuse_unsupported = model_validator(mode="before")(_refuse_unsupported)


class ChatRequest(Parameters):
    """A request for the next message of a conversation."""

    messages: list[Turn] = Field(min_length=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=_MAX_LIKELIEST)

    @property
    def likeliest(self) -> int | None:
        """Number of likely alternatives per token; None without log-probabilities."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last turn's text."""
        last = self.messages[-1]
        return last.role == "assistant" and bool(last.content)


class CompletionRequest(Parameters):
    """A request for the continuation of each of several texts, or lists of tokens."""

    prompt: Annotated[
        list[str | list[Annotated[int, Field(ge=0)]]],
        BeforeValidator(_as_list),
        Field(min_length=1),
    ]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=_MAX_LIKELIEST)
    echo: bool = False

    @property
    def likeliest(self) -> int | None:
        """Number of likely alternatives per token; None without log-probabilities."""
        return self.logprobs

    @property
    def continues(self) -> bool:
        """Return True, because each answer continues a text."""
        return True


class CompletionReply:
    """The continuations of texts, built from the pieces of each answer."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Any, prompt_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        # Some tokenizers omit the space before the first of several tokens.
        self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
        self._prompt_tokens = sum(prompt_tokens)
        self._pieces: list[list[Piece]] = [[] for _ in prompt_tokens]
        # Number of characters of the tokens whose log-probabilities have been returned.
        self._characters = [0] * len(prompt_tokens)
        self._about = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def add(self, index: int, piece: Piece) -> None:
        """Add a piece of the answer with this index."""
        self._pieces[index].append(piece)

    def whole(self) -> dict[str, Any]:
        """Return the complete reply, once the last pieces have been added."""
        choices = [
            self._content("".join(piece.text for piece in pieces))
            | self._end(index, pieces, pieces[-1].finish_reason)
            for index, pieces in enumerate(self._pieces)
        ]
        return self._about | {"object": self.kind, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """Add a piece, and return its chunk."""
        first = not self._pieces[index]
        self.add(index, piece)
        choice = self._delta(piece.text, first) | self._end(index, [piece], piece.finish_reason)
        return self._about | {"object": self.chunk_kind, "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk with the numbers of tokens, which follows the last piece."""
        return self._about | {"object": self.chunk_kind, "choices": [], "usage": self._usage()}

    def _end(self, index: int, pieces: list[Piece], reason: str | None) -> dict[str, Any]:
        known = [
            piece
            for piece in pieces
            if piece.token is not None and (piece.of_prompt or piece.log_probability is not None)
        ]
        logprobs = self._logprobs(index, known) if known else None
        return {"index": index, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        # The token that ends an answer was generated too.
        new = sum(not piece.of_prompt for pieces in self._pieces for piece in pieces)
        total = self._prompt_tokens + new
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": new,
            "total_tokens": total,
        }

    def _token(self, token: int) -> str:
        before = str(self._tokenizer.decode(self._before))
        return str(self._tokenizer.decode([*self._before, token])).removeprefix(before)

    def _content(self, text: str) -> dict[str, Any]:
        """Return the answer's text in a whole reply."""
        return {"text": text}

    def _delta(self, text: str, first: bool) -> dict[str, Any]:
        """Return a piece's text in a chunk."""
        return {"text": text}

    def _logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """Return the log-probabilities of tokens."""
        texts = [self._token(piece.token or 0) for piece in pieces]
        ends = [*accumulate(map(len, texts), initial=self._characters[index])]
        self._characters[index] = ends[-1]
        return {
            "tokens": texts,
            "token_logprobs": [piece.log_probability for piece in pieces],
            "top_logprobs": [
                None
                if piece.log_probability is None
                # Of tokens with the same text, which are parts of characters, show the likeliest.
                else {self._token(token): value for token, value in reversed(piece.likeliest)}
                for piece in pieces
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

    def _logprobs(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
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
