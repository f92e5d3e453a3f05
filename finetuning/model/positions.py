"""Check whether a model supports the row lengths of a run."""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetuning.errors import BaseModelError
from finetuning.model.base_model import outline, text_config
from finetuning.model.one_at_a_time import one_at_a_time

_log = logging.getLogger(__name__)
# Names of position tables: learned embeddings (GPT-2, OPT) or sines (GPT-J).
_TABLE = re.compile(r"wpe|positions?_embed|embed_positions|pos_encoding")
# Some tables have additional rows for padding.
_MAX_EXTRA = 2


def trained_positions(directory: Path) -> float:
    """Return the maximum row length without loss of quality, in positions; inf if unlimited."""
    config = text_config(directory)
    max_length = getattr(config, "max_position_embeddings", None)
    return min(max_length if isinstance(max_length, int) else math.inf, _fixed_up_to(config))


@one_at_a_time()
def check_positions(directory: Path, row: Mapping[str, int]) -> None:
    """Raise a BaseModelError for rows longer than a model's table of position embeddings.

    Models with computed (rotary) positions accept rows longer than those of their training, with
    lower quality; for such rows, a warning is logged. The model is rejected if a long row changes
    the positions of all rows of a batch, so that a row's gradient would depend on other rows. A
    prefix takes the first positions (FL-GLM section 3.1, as in PEFT). ``row`` maps a setting's
    key, for messages, to the maximum number of positions that the setting adds to a row.
    """
    config = text_config(directory)
    max_length = getattr(config, "max_position_embeddings", None)
    fixed = _fixed_up_to(config)
    if not isinstance(max_length, int) or sum(row.values()) <= min(max_length, fixed):
        return
    model = outline(directory)
    numbers = " + ".join(str(number) for number in row.values())
    total = f" = {sum(row.values())}" if len(row) > 1 else ""
    needed = f"a row can take {' + '.join(row)} = {numbers}{total} positions"
    named = f"the {type(model).__name__} in {directory}"
    remedy = f"lower {' or '.join(row)}, or use a different base model"
    if sum(row.values()) > fixed:
        raise BaseModelError(
            f"{needed}, but {named} computes all positions of a batch differently if a row takes "
            f"more than {fixed:.0f}; {remedy}"
        )
    if _has_table(model, max_length):
        raise BaseModelError(f"{needed}, but {named} has only {max_length}; {remedy}")
    _log.warning(
        "%s, but %s was trained for %d; beyond that, its quality degrades",
        needed,
        named,
        max_length,
    )


def _fixed_up_to(config: Any) -> float:
    """Return the row length up to which positions don't depend on a batch's longest row."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings, *(each for each in settings.values() if isinstance(each, dict))]
    fixed = math.inf
    for each in kinds:
        kind = str(each.get("rope_type", ""))
        if "dynamic" in kind:
            fixed = min(fixed, config.max_position_embeddings)
        elif kind == "longrope":
            original = each.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            fixed = min(fixed, original or config.max_position_embeddings)
    return fixed


def _has_table(model: Any, max_length: int) -> bool:
    """Return whether a model has a position table of about ``max_length`` rows."""
    return any(
        tensor.ndim == 2
        and max_length <= len(tensor) <= max_length + _MAX_EXTRA
        and _TABLE.search(name)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    )
