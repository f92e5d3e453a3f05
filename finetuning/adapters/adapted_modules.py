"""Which modules LoRA adapts, found from a model's configuration alone.

LoRA's changes show which inputs a module had. In a linear layer that all tokens pass through, all
tokens' contributions are added up. But an embedding's A changes only in the columns of tokens that
occurred, and an expert's matrices only if a token was routed to it.
"""

from pathlib import Path

import torch
from torch import nn

from finetuning.adapters.adapter import attach_adapter
from finetuning.model.base_model import outline
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.model.placement import path_of_blocks
from finetuning.settings import AdapterSettings

# Names of the modules within a block that choose each token's experts.
_ROUTERS = {"gate", "router"}


@one_at_a_time()
def adapted_modules(directory: Path, settings: AdapterSettings) -> dict[str, bool]:
    """Map the path of each module that LoRA adapts to whether it mixes all tokens.

    These are the linear layers of the blocks that all tokens pass through; experts and routers,
    embeddings, the output head and all other modules aren't. ``directory`` contains the model's
    ``config.json``; weights aren't read. The result is empty for prefixes. Raise a BaseModelError
    if the architecture is unknown, or does not support the targets.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers.pytorch_utils import Conv1D

    if settings.kind == "prefix":
        return {}
    model = outline(directory)
    blocks = path_of_blocks(model, getattr(model.config, "num_hidden_layers", 0))
    with torch.device("meta"):
        adapted = attach_adapter(model, settings, None).get_base_model()
    found = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            # PEFT puts the layers of an expert's several matrices inside each other.
            path = name.replace(".base_layer", "")
            is_in_block = blocks is not None and path.startswith(f"{blocks}.")
            inside = path.removeprefix(f"{blocks}.").split(".")[1:]
            # Routers can be linear layers, and experts a list of them.
            for_some = any(part in _ROUTERS or part.isdecimal() for part in inside)
            is_linear = isinstance(layer.get_base_layer(), nn.Linear | Conv1D)
            found[path] = is_in_block and is_linear and not for_some
    return found
