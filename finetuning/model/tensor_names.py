"""Names of tensors in checkpoints, and in the models that are loaded from them."""

from collections.abc import Collection
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from finetuning.model.base_model import TEXT_TENSORS


def full_names(whole: Any, names: Collection[str]) -> dict[str, str]:
    """Map names in a checkpoint to names in the model that ``transformers`` loads from it.

    Names in a checkpoint may lack the backbone's prefix, be from an older version of the library,
    or refer to matrices that are concatenated on loading. ``whole`` is the result of `outline`.
    """
    changes = get_model_conversion_mapping(whole, TEXT_TENSORS)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    prefix, expected = whole.base_model_prefix, whole.state_dict()
    result = {}
    for name in sorted(names):
        renamed, _ = rename_source_key(name, renamings, converters, prefix, expected)
        result[name] = name if renamed not in expected and name in expected else renamed
    return result
