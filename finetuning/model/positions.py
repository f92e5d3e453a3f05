"""How many positions a model has, and whether a run's rows need more."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from finetuning.model.base_model import BaseModelError

_log = logging.getLogger(__name__)
# Names of tables with a row for each position: learned ones (GPT-2, OPT), or sines (GPT-J).
_TABLE = re.compile(r"wpe|positions?_embed|embed_positions|pos_encoding")
# Some tables begin with rows that stand for padding.
_MOST_EXTRA = 2


def check_positions(directory: Path, row: Mapping[str, int]) -> None:
    """Refuse rows that are longer than the table in which a model looks positions up.

    Models that compute positions (rotary ones) go on beyond those that they were trained for, but
    not as well, so that this is only warned of. A prefix takes the first positions (section 3.1 of
    FL-GLM, as PEFT has it).

    Args:
        directory: of the checkpoint.
        row: how many positions the parts of a row take at most, by the keys that set them.

    Raises:
        BaseModelError: there are fewer positions; the message names the keys and numbers.

    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory)
        most = getattr(config.get_text_config(), "max_position_embeddings", None)
        if not isinstance(most, int) or sum(row.values()) <= most:
            return
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(f"the checkpoint in {directory} can't be loaded: {error}") from error
    numbers = " + ".join(str(number) for number in row.values())
    total = f" = {sum(row.values())}" if len(row) > 1 else ""
    needed = f"a row can take {' + '.join(row)} = {numbers}{total} positions"
    if _has_table(model, most):
        raise BaseModelError(
            f"{needed}, and the {type(model).__name__} in {directory} has {most} and no more; "
            f"lower {' or '.join(row)}, or use another base model"
        )
    _log.warning(
        "%s, and the %s in %s was made for %d: beyond them it will not do as well",
        needed,
        type(model).__name__,
        directory,
        most,
    )


def _has_table(model: Any, most: int) -> bool:
    """Say whether a model looks its positions up in a table of so many rows."""
    return any(
        tensor.ndim == 2 and most <= len(tensor) <= most + _MOST_EXTRA and _TABLE.search(name)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    )
