"""The HTTP routes of the endpoint: models, chat completions, completions, and a chat page."""

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from chambers.endpoint.answer_stream import Piece, Request
from chambers.endpoint.answering import Answerer, BusyError
from chambers.endpoint.messages import Chat, ChatReply, Completion, CompletionReply
from finetuning.errors import UserError

_INVALID = "invalid_request_error"
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


class ApiError(Exception):
    """An error that the client receives in the form of OpenAI's API."""

    def __init__(self, status: int, message: str, kind: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"message": message, "type": kind, "param": parameter, "code": None}


def routes(answerer: Answerer, key: str | None) -> Starlette:
    """Return the application; with a key, requests without it are refused."""
    endpoint = _Endpoint(answerer, key)
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/v1/models", endpoint.models),
            Route("/v1/models/{name}", endpoint.model),
            Route("/v1/chat/completions", endpoint.chat, methods=["POST"]),
            Route("/v1/completions", endpoint.completion, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys((ApiError, HTTPException, Exception), _refuse),
    )


async def _page(_: HttpRequest) -> Response:
    """Return the chat page, which contains no data of this endpoint."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


async def _refuse(_: HttpRequest, error: Exception) -> Response:
    """Return an error in the form of OpenAI's API; omit the text of unexpected errors."""
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, error.detail, _INVALID)
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
        data = [self._described(name) for name in self.answerer.sources]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, http: HttpRequest) -> Response:
        """Describe a model."""
        self._authenticate(http)
        return JSONResponse(self._described(self._known(http.path_params["name"])))

    async def chat(self, http: HttpRequest) -> Response:
        """Answer a conversation."""
        wanted = await self._read(http, Chat)
        turns = [{"role": turn.role, "content": turn.text} for turn in wanted.messages]
        prompt = partial(self.answerer.chat_prompt, turns)
        return await self._respond(http, wanted, "messages", prompt, ChatReply)

    async def completion(self, http: HttpRequest) -> Response:
        """Continue a text."""
        wanted = await self._read(http, Completion)

        def prompt() -> torch.Tensor:
            ids = self.answerer.tokenizer(wanted.prompt)["input_ids"]
            return torch.tensor(ids, dtype=torch.int64)

        return await self._respond(http, wanted, "prompt", prompt, CompletionReply)

    def _described(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.started, "owned_by": "chambers"}

    def _authenticate(self, http: HttpRequest) -> None:
        # Prevent DNS rebinding, with which a web page could send requests.
        if self.key is None and not _is_loopback(http.headers.get("host", "")):
            raise ApiError(400, "without a key, the Host header must name this machine", _INVALID)
        given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if self.key is not None and not hmac.compare_digest(given, self.key.encode()):
            raise ApiError(401, "the API key is missing or wrong", "authentication_error")

    def _known(self, name: str) -> str:
        if name not in self.answerer.sources:
            names = ", ".join(self.answerer.sources)
            raise ApiError(404, f"there is no such model; available: {names}", _INVALID, "model")
        return name

    async def _read(self, http: HttpRequest, form: type[Any]) -> Any:
        self._authenticate(http)
        # Web pages of other origins can't send this content type without permission (CORS).
        if http.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            raise ApiError(415, "the content type must be application/json", _INVALID)
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > _MAX_BODY:
                raise ApiError(413, f"the request is larger than {_MAX_BODY} bytes", _INVALID)
        try:
            wanted = form.model_validate_json(bytes(body))
        except ValidationError as error:
            # If a value matches none of several types, the deepest problem is that of the closest.
            problems = error.errors(include_url=False, include_input=False)
            problem = max(problems, key=lambda problem: len(problem["loc"]))
            name = ".".join(str(part) for part in problem["loc"]) or None
            text = f"{name}: {problem['msg']}" if name else problem["msg"]
            raise ApiError(400, text, _INVALID, name) from error
        self._known(wanted.model)
        return wanted

    async def _respond(
        self,
        http: HttpRequest,
        wanted: Any,
        parameter: str,
        prompt: Callable[[], torch.Tensor],
        form: type[CompletionReply],
    ) -> Response:
        submitted = await self._submit(wanted, parameter, prompt)
        reply = form(wanted.model, self.answerer.tokenizer, submitted.prompt_tokens)
        pieces = submitted.until_disconnected(http)
        if not wanted.stream:
            async with aclosing(pieces):
                async for piece in pieces:
                    reply.add(piece)
            return JSONResponse(reply.whole())
        # Await the first piece here, so that an error can still determine the HTTP status.
        first = await anext(pieces)
        usage = wanted.stream_options is not None and wanted.stream_options.include_usage

        async def events() -> AsyncIterator[str]:
            try:
                yield _event(reply.chunk(first))
                async for piece in pieces:
                    yield _event(reply.chunk(piece))
                if usage:
                    yield _event(reply.usage_chunk())
                yield "data: [DONE]\n\n"
            except ApiError as error:
                yield _event({"error": error.body})
            finally:
                await pieces.aclose()

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _submit(
        self, wanted: Any, parameter: str, prompt: Callable[[], torch.Tensor]
    ) -> "_Pieces":
        pieces = _Pieces(asyncio.get_running_loop())
        try:
            tokens = await asyncio.to_thread(prompt)
            limit = self.answerer.max_new_tokens(wanted.model, len(tokens))
            if (wanted.max_tokens or 0) > limit:
                problem = f"max_tokens = {wanted.max_tokens}: must be at most {limit}"
                raise ApiError(400, problem, _INVALID, "max_tokens")
            request = Request(
                model=wanted.model,
                prompt=tokens,
                max_tokens=wanted.max_tokens or limit,
                emit=pieces.emit,
                temperature=1.0 if wanted.temperature is None else wanted.temperature,
                top_p=1.0 if wanted.top_p is None else wanted.top_p,
                seed=wanted.seed,
                stop=wanted.stops,
                likeliest=wanted.likeliest,
            )
            self.answerer.submit(request)
        except UserError as error:
            raise ApiError(400, str(error), _INVALID, parameter) from error
        except BusyError as error:
            raise ApiError(429, str(error), "rate_limit_error") from error
        pieces.prompt_tokens, pieces.cancel = len(tokens), request.cancelled.set
        return pieces


class _Pieces:
    """The pieces of one answer, passed from the answering thread to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self.prompt_tokens = 0
        self.cancel: Callable[[], None] = lambda: None

    def emit(self, piece: Piece | Exception) -> None:
        """Add a piece or an error; called in the answering thread."""
        with suppress(RuntimeError):  # the event loop is closed: the endpoint is stopping
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            piece = await self._queue.get()
            if isinstance(piece, UserError):
                raise ApiError(503, str(piece), "server_error") from piece
            if isinstance(piece, Exception):
                raise ApiError(500, f"the answer failed ({type(piece).__name__})", "server_error")
            yield piece
            if piece.finish_reason is not None:
                return

    async def until_disconnected(self, http: HttpRequest) -> AsyncGenerator[Piece]:
        """Yield the pieces; cancel the request if its client disconnects or iteration stops."""

        async def watch() -> None:
            while not await http.is_disconnected():
                await asyncio.sleep(_CHECK_SECONDS)
            self.cancel()
            self.emit(ClientDisconnect())

        watching = asyncio.create_task(watch())
        try:
            async for piece in self:
                yield piece
        finally:
            watching.cancel()
            self.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"
