"""The models of ``chambers api`` and ``chambers chat``: a base model, and adapters for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from chambers.errors import CommandError
from chambers.sources import DRAFT_HELP, BaseModelOptions, argument, count, option

if TYPE_CHECKING:
    from chambers.endpoint.answering import Answerer
    from chambers.models import Source

_BASE = "base"


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(BaseModelOptions):
    """Options of commands that answer with any of several models."""

    adapters: Annotated[list[Path] | None, argument("[ADAPTER]…")] = None
    invitation: Annotated[
        Path | None, option("Invitation to a block server, which runs the middle blocks.", "FILE")
    ] = None
    draft: Annotated[str | None, option(DRAFT_HELP, "DRAFT")] = None
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
        """Return the answerer of requests for the models; see `Limits`."""
        from chambers.endpoint.answering import Answerer, Limits
        from chambers.models import find_draft
        from finetuning.model.base_model import load_tokenizer

        sources = self.sources()
        tokenizer = load_tokenizer(next(iter(sources.values())).directory)
        draft = find_draft(self.draft, tokenizer)
        limits = Limits(batch_size, queue, self.max_prompt_length, self.max_new_tokens, draft)
        return Answerer(sources, tokenizer, limits)

    def sources(self) -> "dict[str, Source]":
        """Return the models, keyed by name; raise ``UserError`` if their parts don't match."""
        from chambers.models import find

        sources: dict[str, Source] = {}
        for folder in self.adapters or []:
            name = folder.resolve().name
            if name in {*sources, _BASE}:
                raise CommandError(f"two models are named {name}; rename {folder}")
            sources[name] = find(self.with_adapter(folder, self.model), self.invitation)
        first = next(iter(sources.values()), None)
        options = self.with_adapter(None, self.model)
        sources[_BASE] = first.bare if first else find(options, self.invitation)
        return sources
