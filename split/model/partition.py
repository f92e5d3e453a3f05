"""The partition of a model's blocks and modules among the parties (FL-GLM section 3.1).

A part is built as an instance of the checkpoint's model class, without memory for the weights.
The modules of other parties are then removed. Each block is therefore built with its index in the
whole model and keeps its name, so names of tensors and adapters need no translation.
"""

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from finetuning.errors import BaseModelError
from finetuning.model.base_model import text_config
from finetuning.model.placement import path_of_blocks
from split.settings import SplitSettings

PartyName = Literal["head", "body", "tail"]
PARTIES: tuple[PartyName, ...] = ("head", "body", "tail")

# Names of a backbone's modules from the embedding to the first block: learned position embeddings
# (GPT-2, OPT), a norm (BLOOM), a projection (OPT) and dropout. Despite its name, embedding_norm of
# LFM2 follows the last block.
_BEFORE_BLOCKS = re.compile(r"emb(?!edding_norm)|wpe|wte|pos|drop|project_in")
# Attributes that transform embeddings (Granite, StarCoder 2), with values that have no effect.
_NEUTRAL = {"embedding_multiplier": 1.0, "embedding_scale": 1.0, "embedding_dropout": 0.0}
# Settings with which blocks read what other blocks or the embedding compute (Gemma 3n, Gemma 4
# E2B and E4B).
_ACROSS_BLOCKS = ("num_kv_shared_layers", "hidden_size_per_layer_input")


@dataclass(frozen=True)
class Partition:
    """The number of blocks of each party."""

    blocks: int  # number of blocks of the whole model
    head: int  # number of blocks at the client after the embedding
    tail: int  # number of blocks at the client before the output head

    def range_of(self, party: PartyName) -> range:
        """Return the indices of a party's blocks in the whole model."""
        last = self.blocks - self.tail
        return {
            "head": range(self.head),
            "body": range(self.head, last),
            "tail": range(last, self.blocks),
        }[party]


class _NoPositions(nn.Identity):
    """Replaces learned position embeddings in the body and tail, because the head adds them."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


def partition_of(directory: Path, settings: SplitSettings) -> Partition:
    """Divide a checkpoint's blocks among the parties as the settings specify.

    Raise a BaseModelError if no block is left for the body, blocks need what another party has, or
    the configuration cannot be read.
    """
    config = text_config(directory)
    if any(getattr(config, name, 0) for name in _ACROSS_BLOCKS):
        raise BaseModelError(
            f"split learning can't divide the model in {directory} ({config.model_type}): later "
            "blocks read the keys and values of earlier ones, and all blocks read the token IDs; "
            "use a strategy without split learning, or a different base model"
        )
    blocks = int(config.num_hidden_layers)
    problem = settings.problem_with(blocks, directory)
    if problem is not None:
        raise BaseModelError(problem)
    return Partition(blocks, settings.head_blocks, settings.tail_blocks)


def part_class(whole: Any, partition: Partition, party: PartyName) -> Any:
    """Return a subclass of the whole model's class that contains only the party's modules.

    The subclass has the same name and ``__module__``, by which ``transformers`` looks up classes.
    """
    kind = type(whole)

    def build(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        _keep(self, partition, party)

    names = {"__module__": kind.__module__, "base_model_prefix": whole.base_model_prefix}
    return type(kind.__name__, (kind,), {"__init__": build, **names})


def tensors_of_part(
    whole: Any, full: Mapping[str, str], partition: Partition, party: PartyName
) -> dict[str, str]:
    """Return the names of the checkpoint's tensors from which a party's model is loaded.

    ``whole`` is the result of `outline`, and ``full`` the result of `full_names` for all tensors of
    the checkpoint. The keys of the result are names to pass to ``from_pretrained``, and the values
    are names in the checkpoint. They differ only for a tied tensor that is stored under the other
    tensor's name.
    """
    with torch.device("meta"):
        part = part_class(whole, partition, party)(copy.deepcopy(whole.config))
    owned, stored = part.state_dict().keys(), {model: name for name, model in full.items()}
    result = {name: name for name, model in full.items() if model in owned}
    for absent, present in tied_pairs(whole):
        if absent in owned and absent not in stored and present in stored:
            result[absent] = stored[present]
    return result


def tied_pairs(whole: Any) -> list[tuple[str, str]]:
    """Return the pairs of names of a model's tied tensors, each pair in both orders."""
    pairs = list(whole.all_tied_weights_keys.items())
    return pairs + [(other, one) for one, other in pairs]


def stands_before_blocks(name: str) -> bool:
    """Return whether a module with this name precedes the blocks; otherwise, it follows them."""
    return _BEFORE_BLOCKS.search(name) is not None


def blocks_of(model: Any, blocks: int) -> str:
    """Return the path of the ``ModuleList`` of all blocks in a whole causal model or a part of one.

    Raise a BaseModelError if the blocks are not in one list.
    """
    path = path_of_blocks(model, blocks)
    if path is None:
        raise BaseModelError(
            f"split learning can't divide {type(model).__name__}: its {blocks} blocks are not in a "
            "single list"
        )
    return path


def _keep(model: Any, partition: Partition, party: PartyName) -> None:
    """Remove from a model all modules that do not belong to the party."""
    parent, _, attribute = blocks_of(model, partition.blocks).rpartition(".")
    container = model.get_submodule(parent)
    blocks, own = getattr(container, attribute), nn.ModuleList()
    for number in partition.range_of(party):
        own.add_module(str(number), blocks[number])
    for name, module in container.named_children():
        if "rot" in name and hasattr(module, "config"):  # it serves all types of blocks
            module.config = copy.deepcopy(module.config)
    _shorten(model, partition, party)
    for name, module in list(container.named_children()):
        # All parties need rotary embeddings.
        if module is blocks or "rot" in name:
            continue
        owner = "head" if stands_before_blocks(name) else "tail"
        if owner != party:
            positions = owner == "head" and re.search("wpe|pos", name)
            setattr(container, name, _NoPositions() if positions else nn.Identity())
    setattr(container, attribute, own)
    if party != "head":
        for name in _NEUTRAL.keys() & vars(container).keys():
            setattr(container, name, _NEUTRAL[name])
    if party != "tail":
        for name, _ in list(model.named_children()):
            if name != model.base_model_prefix:
                setattr(model, name, nn.Identity())
    model.all_tied_weights_keys = {}


def _shorten(model: Any, partition: Partition, party: PartyName) -> None:
    """Restrict a model's configurations, and their lists with one entry per block, to a party."""
    own = partition.range_of(party)
    modules = (module for path, module in model.named_modules() if "rot" not in path)
    configs: list[Any] = [getattr(module, "config", None) for module in modules]
    for config in {id(config): config for config in configs}.values():
        if getattr(config, "num_hidden_layers", None) != partition.blocks:
            continue
        for name, value in list(vars(config).items()):
            per_block = isinstance(value, list | tuple) and len(value) == partition.blocks
            if per_block and not name.endswith("_id") and name != "architectures":
                setattr(config, name, value[own.start : own.stop])
        config.num_hidden_layers = len(own)
        if config.is_heterogeneous:  # Gemma 4
            settings = config.to_dict()["per_layer_config"]
            config.per_layer_config = {
                int(block) - own.start: settings[block] for block in settings if int(block) in own
            }
        config.tie_word_embeddings = False
