"""``chambers api``, and the options of commands that answer with any of several models."""

import ipaddress
import os
import signal
import socket
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError, read_bytes
from chambers.sources import DRAFT, INVITATION, BaseModelOptions, argument, count, option
from split.address import parse_address

if TYPE_CHECKING:
    from chambers.endpoint.answering import Answerer
    from chambers.model_source import ModelSource

_BASE = "base"
_MIN_KEY_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(BaseModelOptions):
    """Options of commands that answer with any of several models."""

    adapters: Annotated[list[Path] | None, argument("[ADAPTER]…")] = None
    invitation: Annotated[Path | None, INVITATION] = None
    draft: Annotated[str | None, DRAFT] = None
    max_prompt_length: Annotated[
        int, count("Maximum length of a prompt in tokens; default 4096.")
    ] = 4096
    max_new_tokens: Annotated[
        int, count("Maximum tokens per answer (requests can ask for fewer); default 1024.")
    ] = 1024

    def check_models(self) -> None:
        """Raise ``UserError`` if a folder is missing, without importing heavy libraries."""
        for folder in [*(self.adapters or []), None]:
            self.with_adapter(folder, self.model)

    def answerer(self, batch_size: int, queue: int) -> "Answerer":
        """Return the answerer of requests for the models; see `AnswerLimits`."""
        from chambers.endpoint.answering import Answerer, AnswerLimits
        from chambers.models import find_draft
        from finetuning.model.tokenizer import load_tokenizer

        sources = self.sources()
        tokenizer = load_tokenizer(next(iter(sources.values())).directory)
        draft = find_draft(self.draft, tokenizer, sources.values())
        limits = AnswerLimits(batch_size, queue, self.max_prompt_length, self.max_new_tokens, draft)
        return Answerer(sources, tokenizer, limits)

    def sources(self) -> "dict[str, ModelSource]":
        """Return the models, keyed by name; raise ``UserError`` if their parts don't match."""
        from chambers.models import find_source

        sources: dict[str, ModelSource] = {}
        for folder in self.adapters or []:
            name = folder.resolve().name
            if name in {*sources, _BASE}:
                raise CommandError(f"two models are named {name}; rename {folder}")
            sources[name] = find_source(self.with_adapter(folder, self.model), self.invitation)
        first = next(iter(sources.values()), None)
        options = self.with_adapter(None, self.model)
        sources[_BASE] = first.bare if first else find_source(options, self.invitation)
        return sources


@dataclass(frozen=True, kw_only=True)
class Api(ModelsOptions):
    """Answer programs that use OpenAI's API.

    Serve the base model as "base", and each adapter under the name of its folder:

    \b
      chambers api runs/…/adapters/global runs/…/adapters/clients/court
      chambers api --model smollm2

    With an invitation from chambers serve, a block server runs the middle blocks:

    \b
      chambers api --invitation court.json state/adapters/global

    Programs use http://127.0.0.1:8000/v1 as the base URL; http://127.0.0.1:8000 is a page to chat
    with the models. On addresses other than loopback, requests need the key in --key-file; the
    connection isn't encrypted, so put a proxy with TLS in front. Neither prompts nor answers are
    logged or written to disk.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    listen: Annotated[
        str, option("Address to listen on; default 127.0.0.1:8000.", "IP_ADDRESS:PORT")
    ] = "127.0.0.1:8000"
    key_file: Annotated[
        Path | None, option("File with the API key that requests must send.", "FILE")
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        option("Origin of web pages that may send requests; may be repeated.", "URL"),
    ] = None
    batch_size: Annotated[
        int, count("Number of requests that are answered together; default 8.")
    ] = 8
    queue: Annotated[
        int, count("Number of requests that may wait; further ones are refused; default 64.")
    ] = 64

    def __call__(self) -> int:
        """Answer requests until SIGINT or SIGTERM."""
        self.check_models()
        key = self._key()
        with self._listen(key) as listener:
            import uvicorn

            from chambers.endpoint.answering import BROKEN
            from chambers.endpoint.routes import routes

            with self.answerer(self.batch_size, self.queue) as answerer:
                host, port = listener.getsockname()[:2]
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                print(f"models: {', '.join(answerer.sources)}")
                print(f"chat page: {url}")
                print(f"answering at {url}/v1", flush=True)
                config = uvicorn.Config(
                    routes(answerer, key, self.allow_origin or ()),
                    log_level="critical",  # tracebacks may quote prompts
                    access_log=False,
                    timeout_graceful_shutdown=5,
                )
                # uvicorn stops on these signals, and then raises them again.
                for name in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(name, lambda *_: None)
                answerer.on_broken = partial(os.kill, os.getpid(), signal.SIGTERM)
                uvicorn.Server(config).run(sockets=[listener])
            if answerer.broken:
                raise CommandError(BROKEN)
        return 0

    def _key(self) -> str | None:
        if self.key_file is None:
            return None
        key = read_bytes(self.key_file).decode("utf-8-sig", errors="replace").strip()
        if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
            raise CommandError(
                f"--key-file {self.key_file}: the key must have at least {_MIN_KEY_LENGTH} "
                "printable ASCII characters; make one with: openssl rand -hex 32"
            )
        return key

    def _listen(self, key: str | None) -> socket.socket:
        try:
            host, port = parse_address(self.listen)
            address = ipaddress.ip_address(host)
        except ValueError as error:
            raise CommandError(f"--listen {self.listen}: must be IP_ADDRESS:PORT") from error
        if key is None and not address.is_loopback:
            raise CommandError(f"--listen {self.listen}: not a loopback address, so add --key-file")
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family)
        except OSError as error:
            raise CommandError(f"--listen {self.listen}: {error}") from error
