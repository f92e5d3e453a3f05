"""Request bodies, as in OpenAI's API; unknown parameters are ignored."""

from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

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
    stop: str | list[str] | None = None
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
