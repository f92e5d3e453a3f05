"""The HTTP routes of the endpoint: models, chat completions, completions, and a chat page."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from markdown_it import MarkdownIt
from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chambers.endpoint.answer_stream import Piece, Request
from chambers.endpoint.answering import Answerer, BusyError
from chambers.endpoint.messages import ChatReply, ChatRequest, CompletionReply, CompletionRequest
from chambers.endpoint.refusals import ApiError, refusal_of
from chambers.errors import CommandError
from finetuning.data.prompts import chat_prompt
from finetuning.errors import UserError

_MAX_BODY = 4 * 2**20  # in bytes
# Seconds between checks whether the client is still connected.
_CHECK_SECONDS = 0.5

_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_SCRIPT = _PAGE.partition("<script>")[2].partition("</script>")[0]
_SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'sha256-{_SCRIPT_DIGEST}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
}
# Raw HTML is escaped. Links and images could make a browser send a conversation elsewhere.
_MARKDOWN = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("table")
_MARKDOWN.disable(["autolink", "image", "link", "reference"])


class _Text(BaseModel):
    """A text to be shown."""

    text: str


def routes(answerer: Answerer, key: str | None, origins: Sequence[str] = ()) -> Starlette:
    """Return the application; with a key, requests without it are refused.

    Web pages of these ``origins`` can send requests.
    """
    endpoint = _Endpoint(answerer, key)
    allowed: Any = {"allow_origins": origins, "allow_methods": ["*"], "allow_headers": ["*"]}
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/v1/models", endpoint.models),
            Route("/v1/models/{name:path}", endpoint.model),
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/completions", endpoint.completion, methods=["POST"]),
            Route("/markdown", endpoint.markdown, methods=["POST"]),
        ],
        middleware=[Middleware(CORSMiddleware, **allowed)] if origins else [],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _refuse),
    )


async def _page(_: HttpRequest) -> Response:
    """Return the chat page, which contains no data of this endpoint."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    """Return an error in the form of OpenAI's API; omit the text of unexpected errors."""
    if isinstance(error, HTTPException):  # an unknown path or method
        known = "this endpoint has GET /v1/models, POST /v1/chat/completions and /v1/completions"
        reason = f"{error.detail}: {http.method} {http.url.path}; {known}"
        error = ApiError(error.status_code, reason)
    elif not isinstance(error, ApiError):
        error = ApiError(500, f"the request failed ({type(error).__name__})", "server_error")
    return JSONResponse({"error": error.body}, error.status)


def _is_loopback(host: str) -> bool:
    """Return whether a Host header names this machine itself."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass
class _Endpoint:
    answerer: Answerer
    key: str | None
    started: int = field(default_factory=lambda: int(time.time()))

    async def models(self, http: HttpRequest) -> Response:
        """List the models."""
        self._authenticate(http)
        data = [self._describe(name) for name in self.answerer.sources]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, http: HttpRequest) -> Response:
        """Describe a model."""
        self._authenticate(http)
        return JSONResponse(self._describe(self._known(http.path_params["name"])))

    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation."""
        wanted = await self._read(http, ChatRequest)
        turns = [turn.in_template for turn in wanted.messages]
        prompts = [partial(chat_prompt, turns, self.answerer.tokenizer)]
        return await self._respond(http, wanted, "messages", prompts, ChatReply)

    async def completion(self, http: HttpRequest) -> Response:
        """Continue texts."""
        wanted = await self._read(http, CompletionRequest)
        prompts = [partial(self._tokens, prompt) for prompt in wanted.prompt]
        return await self._respond(http, wanted, "prompt", prompts, CompletionReply)

    async def markdown(self, http: HttpRequest) -> Response:
        """Return a text in Markdown as HTML, for the chat page."""
        text = await self._read(http, _Text)
        return JSONResponse({"html": _MARKDOWN.render(text.text)})

    def _tokens(self, prompt: str | list[int]) -> torch.Tensor:
        """Return a prompt's tokens; raise ``CommandError`` if one isn't in the vocabulary."""
        tokenizer = self.answerer.tokenizer
        ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if ids and max(ids) >= len(tokenizer):
            raise CommandError(f"{max(ids)} is not a token: there are {len(tokenizer)}")
        return torch.tensor(ids, dtype=torch.int64)

    def _describe(self, name: str) -> dict[str, Any]:
        about = {"object": "model", "created": self.started, "owned_by": "chambers"}
        return {"id": name, **about, "description": self.answerer.sources[name].description}

    def _authenticate(self, http: HttpRequest) -> None:
        # Prevent DNS rebinding, with which a web page could send requests.
        if self.key is None and not _is_loopback(http.headers.get("host", "")):
            raise ApiError(400, "without a key, the Host header must name this machine")
        scheme, _, credentials = http.headers.get("authorization", "").partition(" ")
        sent = credentials.strip() if scheme.lower() == "bearer" else ""
        if self.key is not None and not hmac.compare_digest(sent.encode(), self.key.encode()):
            raise ApiError(401, "the API key is missing or wrong", "authentication_error")

    def _known(self, name: str) -> str:
        if name not in self.answerer.sources:
            problem = f"there is no such model; available: {', '.join(self.answerer.sources)}"
            raise ApiError(404, problem, parameter="model", code="model_not_found")
        return name

    async def _read(self, http: HttpRequest, form: type[Any]) -> Any:
        self._authenticate(http)
        # Web pages of other origins can't send this content type without permission (CORS).
        kind = http.headers.get("content-type", "").lower().partition(";")[0]
        if kind.strip() != "application/json":
            raise ApiError(415, "the content type must be application/json")
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                raise ApiError(413, f"the request is larger than {_MAX_BODY} bytes")
        try:
            return form.model_validate_json(bytes(body))
        except ValidationError as error:
            raise refusal_of(error) from error

    async def _respond(
        self,
        http: HttpRequest,
        wanted: Any,
        parameter: str,
        prompts: Sequence[Callable[[], torch.Tensor]],
        form: type[CompletionReply],
    ) -> Response:
        self._known(wanted.model)
        submitted = await self._submit(wanted, parameter, prompts)
        reply = form(wanted.model, self.answerer.tokenizer, submitted.prompt_tokens)
        pieces = submitted.until_disconnected(http)
        if not wanted.stream:
            async with aclosing(pieces):
                async for piece in pieces:
                    reply.add(*piece)
            return JSONResponse(reply.whole())
        # Await the first piece here, so that an error can still determine the HTTP status.
        first = await anext(pieces)

        async def events() -> AsyncIterator[str]:
            try:
                yield _event(reply.chunk(*first))
                async for piece in pieces:
                    yield _event(reply.chunk(*piece))
                if wanted.stream_options.include_usage:
                    yield _event(reply.usage_chunk())
                yield "data: [DONE]\n\n"
            except ApiError as error:
                yield _event({"error": error.body})
            finally:
                await pieces.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _submit(
        self, wanted: Any, parameter: str, prompts: Sequence[Callable[[], torch.Tensor]]
    ) -> "_Pieces":
        if len(prompts) > self.answerer.limits.queue:
            problem = f"a request has at most {self.answerer.limits.queue} prompts"
            raise ApiError(400, problem, parameter=parameter)
        pieces = _Pieces(asyncio.get_running_loop(), len(prompts))
        try:
            tokens_of_prompts = [await asyncio.to_thread(prompt) for prompt in prompts]
            requests = [
                self._request(wanted, index, tokens, partial(pieces.emit, index))
                for index, tokens in enumerate(tokens_of_prompts)
            ]
            self.answerer.submit(*requests)
        except UserError as error:
            raise ApiError(400, str(error), parameter=parameter) from error
        except BusyError as error:
            raise ApiError(429, str(error), "rate_limit_error") from error
        pieces.prompt_tokens = [len(tokens) for tokens in tokens_of_prompts]
        pieces.requests = requests
        return pieces

    def _request(
        self,
        wanted: Any,
        index: int,
        tokens: torch.Tensor,
        emit: Callable[[Piece | Exception], None],
    ) -> Request:
        limit = self.answerer.max_new_tokens(wanted.model, len(tokens))
        echo = (
            wanted.prompt[index] if isinstance(wanted, CompletionRequest) and wanted.echo else None
        )
        return Request(
            model=wanted.model,
            prompt=tokens,
            # As other servers do, don't refuse programs that ask for more by default.
            max_tokens=limit if wanted.max_tokens is None else min(wanted.max_tokens, limit),
            emit=emit,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            seed=wanted.seed,
            stop=tuple(filter(None, wanted.stop)),
            likeliest=wanted.likeliest,
            continues=wanted.continues,
            grammar=wanted.response_format.grammar,
            echo=self.answerer.tokenizer.decode(echo) if isinstance(echo, list) else echo,
        )


class _Pieces:
    """The pieces of a request's answers, passed from the answering thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, answers: int) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[tuple[int, Piece | Exception]] = asyncio.Queue()
        self._unfinished = answers
        self.prompt_tokens: list[int] = []
        self.requests: list[Request] = []

    def cancel(self) -> None:
        """Cancel all requests."""
        for request in self.requests:
            request.cancelled.set()

    def emit(self, index: int, piece: Piece | Exception) -> None:
        """Add an answer's piece or an error; called in the answering thread."""
        with suppress(RuntimeError):  # the event loop is closed: the endpoint is stopping
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

    async def until_disconnected(self, http: HttpRequest) -> AsyncGenerator[tuple[int, Piece]]:
        """Yield the pieces; cancel the request if its client disconnects or iteration stops."""

        async def watch() -> None:
            while not await http.is_disconnected():
                await asyncio.sleep(_CHECK_SECONDS)
            self.cancel()
            self.emit(0, ClientDisconnect())

        watching = asyncio.create_task(watch())
        try:
            while self._unfinished:
                index, piece = await self._queue.get()
                if isinstance(piece, UserError):
                    raise ApiError(503, str(piece), "server_error") from piece
                if isinstance(piece, Exception):
                    problem = f"the answer failed ({type(piece).__name__})"
                    raise ApiError(500, problem, "server_error")
                self._unfinished -= piece.finish_reason is not None
                yield index, piece
        finally:
            watching.cancel()
            self.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
