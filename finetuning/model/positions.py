"""Check whether a model has enough positions for a run's rows."""

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
# Some tables begin with rows for padding.
_MOST_EXTRA = 2


def check_positions(directory: Path, row: Mapping[str, int]) -> None:
    """Refuse rows that are longer than a model's table of positions.

    Models that compute positions (rotary ones) accept more than they were trained for, with lower
    quality, which is only warned of. A prefix takes the first positions (FL-GLM section 3.1, as in
    PEFT).

    Args:
        directory: Directory of the checkpoint.
        row: Maximal number of positions that each part of a row takes, by the key that sets it.

    Raises:
        BaseModelError: There are fewer positions; the message names the keys and numbers.

    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
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
            f"{needed}, but the {type(model).__name__} in {directory} has only {most}; "
            f"lower {' or '.join(row)}, or use another base model"
        )
    _log.warning(
        "%s, but the %s in %s was trained for %d; its quality degrades beyond them",
        needed,
        type(model).__name__,
        directory,
        most,
    )


def _has_table(model: Any, most: int) -> bool:
    """Whether a model looks its positions up in a table of about `most` rows."""
    return any(
        tensor.ndim == 2 and most <= len(tensor) <= most + _MOST_EXTRA and _TABLE.search(name)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    )
