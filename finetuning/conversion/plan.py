"""The conversion plan of a model: target class, tensors and tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from finetuning.errors import UserError


class ConversionError(UserError, ValueError):
    """A checkpoint can't be converted; the message gives the reason and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to convert a model.

    ``rename`` maps a source tensor to target tensors by name, or to an empty dict if the target
    computes the tensor itself; it raises a `ConversionError` for an unknown tensor.
    """

    model: str  # name of the model
    config: Any  # configuration of the target's class in transformers
    rename: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]
    special_tokens: tuple[str, ...] = ()  # in order, after the vocabulary of ``tokenizer.model``
    first_tokens: tuple[str, ...] = ()  # special tokens that are prepended to each text
    tokenizer: Mapping[str, Any]  # arguments of the target's tokenizer
    chat_template: str | None = None  # Jinja template of the prompts in the model's training
    end_of_answer: tuple[str, ...] = ()  # additional special tokens that end a generated answer
    changes: tuple[str, ...] = ()  # the target's differences from the source, for its README.md


def sizes(config: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """Return values of a source's ``config.json`` under their names in transformers.

    ``keys`` maps names in the source to names in transformers. Raise a ConversionError if a value
    is missing.
    """
    missing = sorted(keys.keys() - config.keys())
    if missing:
        raise ConversionError(f"config.json has no {', '.join(missing)}")
    return {name: config[key] for key, name in keys.items()}
