"""The command ``chambers api`` and its options."""

import ipaddress
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError, read_bytes
from chambers.sources import (
    DRAFT_HELP,
    AdapterOptions,
    BaseModelOptions,
    argument,
    check_at_least_one,
    option,
)

if TYPE_CHECKING:
    from chambers.models import Source

_BASE = "base"
_MIN_KEY_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class Api(BaseModelOptions):
    """Answer programs that use OpenAI's API.

    Serve the base model as "base", and each adapter under the name of its folder:

    \b
      chambers api runs/…/adapters/global runs/…/adapters/clients/court
      chambers api --model smollm2

    With an invitation from chambers serve, the middle blocks are at a block server:

    \b
      chambers api --invitation court.json state/adapters/global

    Programs use http://127.0.0.1:8000/v1 as the base URL. On other addresses than loopback, they
    need the key in --key-file; the connection isn't encrypted, so put a proxy with TLS in front.
    Neither prompts nor answers are logged or written to disk.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    adapters: Annotated[list[Path] | None, argument("[ADAPTER]…")] = None
    invitation: Annotated[
        Path | None, option("Invitation to a block server, which runs the middle blocks.", "FILE")
    ] = None
    listen: Annotated[str, option("Address to listen on; default 127.0.0.1:8000.", "HOST:PORT")] = (
        "127.0.0.1:8000"
    )
    key_file: Annotated[
        Path | None, option("File with the key that requests must have.", "FILE")
    ] = None
    batch_size: Annotated[
        int, option("Number of requests that are answered together; default 8.", "N")
    ] = 8
    draft: Annotated[str | None, option(DRAFT_HELP, "DRAFT")] = None
    queue: Annotated[
        int, option("Number of requests that may wait; further ones are refused; default 64.", "N")
    ] = 64
    max_prompt_length: Annotated[
        int, option("Maximum length of a prompt in tokens; default 4096.", "N")
    ] = 4096
    max_new_tokens: Annotated[
        int, option("Maximum tokens per answer, and the default; default 1024.", "N")
    ] = 1024

    def __call__(self) -> int:
        """Answer requests until SIGINT or SIGTERM."""
        check_at_least_one(self, "batch_size", "queue", "max_prompt_length", "max_new_tokens")
        for folder in [*(self.adapters or []), None]:  # before heavy libraries are imported
            self._options(folder)
        key = self._key()
        listener = self._listen(key)
        with listener:
            import uvicorn

            from chambers.drafts import find_draft
            from chambers.endpoint.answering import Answerer, Limits
            from chambers.endpoint.routes import routes
            from finetuning.model.base_model import load_tokenizer

            sources = self.sources()
            tokenizer = load_tokenizer(next(iter(sources.values())).directory)
            limits = Limits(
                batch_size=self.batch_size,
                queue=self.queue,
                max_prompt_length=self.max_prompt_length,
                max_new_tokens=self.max_new_tokens,
                draft=find_draft(self.draft, tokenizer),
            )
            with Answerer(sources, tokenizer, limits) as answerer:
                host, port = listener.getsockname()[:2]
                shown = f"[{host}]" if ":" in host else host
                print(f"models: {', '.join(sources)}")
                print(f"answering at http://{shown}:{port}/v1", flush=True)
                config = uvicorn.Config(
                    routes(answerer, key),
                    log_level="critical",  # tracebacks may quote prompts
                    access_log=False,
                    timeout_graceful_shutdown=5,
                )
                # uvicorn ends at these signals, and then raises them again.
                for name in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(name, lambda *_: None)
                uvicorn.Server(config).run(sockets=[listener])
            if answerer.broken:
                raise CommandError("a GPU kernel has failed, after which this process can run none")
        return 0

    def sources(self) -> "dict[str, Source]":
        """Find the models by name; raise ``UserError`` if their parts don't match."""
        from chambers.models import find

        sources: dict[str, Source] = {}
        for folder in self.adapters or []:
            name = folder.resolve().name
            if name in {*sources, _BASE}:
                raise CommandError(f"two models would be named {name}; copy {folder} elsewhere")
            sources[name] = find(self._options(folder), self.invitation)
        bare = [source.bare for source in sources.values()]
        sources[_BASE] = bare[0] if bare else find(self._options(None), self.invitation)
        return sources

    def _options(self, folder: Path | None) -> AdapterOptions:
        options = AdapterOptions(
            model=self.model, dtype=self.dtype, quantization=self.quantization, adapter=folder
        )
        options.check_folders()
        return options

    def _key(self) -> str | None:
        if self.key_file is None:
            return None
        key = read_bytes(self.key_file).decode("ascii", errors="replace").strip()
        if len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
            raise CommandError(
                f"--key-file {self.key_file}: the key must have at least {_MIN_KEY_LENGTH} "
                "printable ASCII characters; make one with: openssl rand -hex 32"
            )
        return key

    def _listen(self, key: str | None) -> socket.socket:
        host, _, port = self.listen.rpartition(":")
        try:
            address = ipaddress.ip_address(host.strip("[]"))
            number = int(port)
        except ValueError as error:
            raise CommandError(f"--listen {self.listen}: must be IP_ADDRESS:PORT") from error
        if key is None and not address.is_loopback:
            raise CommandError(f"--listen {self.listen}: others can connect, so add --key-file")
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        try:
            return socket.create_server((str(address), number), family=family)
        except (OSError, OverflowError) as error:
            raise CommandError(f"--listen {self.listen}: {error}") from error
