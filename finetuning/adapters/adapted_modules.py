"""Which modules LoRA adapts, found from a model's configuration alone.

LoRA's changes show which inputs a module had. In a linear layer that all tokens pass through, all
tokens' contributions are added up. But an embedding's A changes only in the columns of tokens that
occurred, and an expert's matrices only if a token was routed to it.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetuning.adapters.adapter import attach_adapter, target_names
from finetuning.errors import BaseModelError
from finetuning.model.base_model import outline
from finetuning.model.one_at_a_time import one_at_a_time
from finetuning.model.placement import path_of_blocks
from finetuning.settings import AdapterSettings, names_modules

# Names of the modules within a block that choose each token's experts.
_ROUTERS = {"gate", "router"}
# Further modules that ``all-linear`` leaves out.
_GATES = re.compile(r"(.*_)?(gate|router)|altup")


@one_at_a_time()
def adapted_modules(directory: Path, settings: AdapterSettings) -> dict[str, bool]:
    """Map the path of each module that LoRA adapts to whether it mixes all tokens.

    These are the linear layers of the blocks that all tokens pass through; experts and routers,
    embeddings, the output head and all other modules aren't. ``directory`` contains the model's
    ``config.json``; weights aren't read. The result is empty for prefixes. Raise a BaseModelError
    if the architecture is unknown, or does not support the targets.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    if settings.kind == "prefix":
        return {}
    model = outline(directory)
    blocks = _path_of_blocks(model)
    with torch.device("meta"):
        adapted = attach_adapter(model, settings, None).get_base_model()
    modules = {}
    for name, layer in adapted.named_modules():
        if isinstance(layer, BaseTunerLayer):
            # PEFT puts the layers of an expert's several matrices inside each other.
            path = name.replace(".base_layer", "")
            modules[path] = _mixes_tokens(path, layer.get_base_layer(), blocks)
    return modules


@one_at_a_time()
def with_names(directory: Path, settings: AdapterSettings) -> AdapterSettings:
    """Return settings whose ``targets`` are names of modules, as short as they can be.

    ``directory`` contains the model's ``config.json``. Raise a BaseModelError if the architecture
    is unknown, or a target matches no module.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    if settings.kind == "prefix":
        return settings
    model, targets = outline(directory), settings.targets.strip()
    paths, names = {path for path, _ in model.named_modules()}, target_names(settings)
    default = DEFAULTS.get(model.config.model_type)
    if not targets and isinstance(default, list):
        names = default
    elif not names_modules(targets):
        chosen = _linear_layers(model)
        if targets.lower() not in {"", "all-linear"}:
            try:
                chosen = set(filter(re.compile(targets).fullmatch, paths))
            except re.error as error:
                reason = f'adapter.targets = "{targets}" is malformed: {error}'
                raise BaseModelError(reason) from error
        # The shortest endings of the chosen paths that no other path has.
        others = {ending for path in paths - chosen for ending in _endings(path)}
        names = sorted({next(e for e in _endings(p) if e not in others) for p in chosen})
        names = names or [targets or "all-linear"]
    for name in names:
        if not any(f".{path}".endswith(f".{name}") for path in paths):
            raise BaseModelError(
                f'adapter.targets = "{targets}": {name} matches no module of a '
                f"{type(model).__name__}, such as {max(paths)}"
            )
    return settings.model_copy(update={"targets": ",".join(names)})


def _path_of_blocks(model: Any) -> str | None:
    return path_of_blocks(model, getattr(model.config, "num_hidden_layers", 0))


def _mixes_tokens(path: str, layer: Any, blocks: str | None) -> bool:
    """Return whether a module is a linear layer of a block that all tokens pass through."""
    from transformers.pytorch_utils import Conv1D

    is_in_block = blocks is not None and path.startswith(f"{blocks}.")
    inside = path.removeprefix(f"{blocks}.").split(".")[1:]
    # Routers can be linear layers, and experts a list of them.
    for_some = any(part in _ROUTERS or part.isdecimal() for part in inside)
    return is_in_block and isinstance(layer, nn.Linear | Conv1D) and not for_some


def _linear_layers(model: Any) -> set[str]:
    """Return the paths of the modules that ``all-linear`` adapts."""
    blocks, paths = _path_of_blocks(model), set()
    for path, layer in model.named_modules():
        parent, _, name = path.rpartition(".")
        # Fused kernels of state-space models read these weights without calling the layers.
        is_fused = name in {"out_proj", "dt_proj"} and hasattr(model.get_submodule(parent), "D")
        is_gate = any(map(_GATES.fullmatch, path.split(".")))
        if _mixes_tokens(path, layer, blocks) and not (
            is_fused or is_gate or _names_experts(model, name)
        ):
            paths.add(path)
    return paths


def _names_experts(model: Any, name: str) -> bool:
    """Return whether PEFT adapts experts' parameters instead of the modules of this name."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # only together with others
        return True
    return not config.target_modules


def _endings(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]
