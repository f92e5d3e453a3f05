"""Drafts of the next tokens, which a model then verifies in a single pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chambers.errors import CommandError
from finetuning.model.base_model import load_base_model, load_tokenizer
from finetuning.settings import ModelSettings

_FROM_PROMPT = 5  # number of tokens per draft


@dataclass(frozen=True)
class Draft:
    """How tokens are drafted."""

    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of ``generate``
    room: int = 0  # number of drafted tokens by which a text may exceed its maximum length


NO_DRAFT = Draft()


def find_draft(name: str | None, tokenizer: Any) -> Draft:
    """Return the ``Draft`` that ``--draft`` selects; load the small model if one is named.

    Raise ``CommandError`` if the tokenizers of the small and the large model differ.
    """
    if name is None:
        return NO_DRAFT
    if name == "prompt":
        return Draft({"prompt_lookup_num_tokens": _FROM_PROMPT}, room=_FROM_PROMPT)
    small = load_base_model(ModelSettings(name=name))
    if load_tokenizer(small.directory).get_vocab() != tokenizer.get_vocab():
        raise CommandError(f"--draft {name}: its tokenizer is not that of the model")
    return Draft({"assistant_model": small.model})
