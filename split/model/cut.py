"""Which blocks and modules of a model each party has (FL-GLM section 3.1).

A part is the checkpoint's own model class, built as a whole without memory for its weights, from
which everything that other parties have is then taken out. So each block is made for its absolute
place, and keeps its name: no name of a tensor or of an adapter has to be translated.
"""

import copy
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from finetuning.model.base_model import BaseModelError
from finetuning.settings import SplitSettings

PartyName = Literal["head", "body", "tail"]
PARTIES: tuple[PartyName, ...] = ("head", "body", "tail")

# What a backbone does between its embedding and its first block, by its modules' names: positions
# that are added (GPT-2, OPT), a norm (BLOOM), a projection (OPT) and dropout. In spite of its name
# LFM2's embedding_norm comes after the last block.
_BEFORE_BLOCKS = re.compile(r"emb(?!edding_norm)|wpe|wte|pos|drop|project_in")
# The same as plain numbers (Granite, StarCoder 2), and what makes them do nothing.
_NEUTRAL = {"embedding_multiplier": 1.0, "embedding_scale": 1.0, "embedding_dropout": 0.0}


@dataclass(frozen=True)
class Cut:
    """How many blocks each party has.

    Attributes:
        blocks: of the whole model.
        head: of those, the first at the client.
        tail: the last at the client.

    """

    blocks: int
    head: int
    tail: int

    def range_of(self, party: PartyName) -> range:
        """Give the absolute numbers of a party's blocks."""
        last = self.blocks - self.tail
        return {
            "head": range(self.head),
            "body": range(self.head, last),
            "tail": range(last, self.blocks),
        }[party]

    def party_of(self, block: int) -> PartyName | None:
        """Give whose a block is; None for one beyond the model's (extra prediction layers)."""
        return next((party for party in PARTIES if block in self.range_of(party)), None)


class _NoPositions(nn.Identity):
    """Stands where learned positions were: the head has added them already."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(())


def cut_of(directory: Path, settings: SplitSettings) -> Cut:
    """Divide a checkpoint's blocks as the settings say.

    Raises:
        BaseModelError: nothing is left for the body, or the configuration can't be read.

    """
    from transformers import AutoConfig

    try:
        blocks = int(AutoConfig.from_pretrained(directory).num_hidden_layers)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BaseModelError(
            f"the number of blocks can't be read from {directory / 'config.json'}: {error}"
        ) from error
    head, tail = settings.head_blocks, settings.tail_blocks
    if head + tail >= blocks:
        raise BaseModelError(
            f"split.head-blocks = {head} and split.tail-blocks = {tail} leave the server none of "
            f"the {blocks} blocks of the model in {directory}; lower them to {blocks - 1} together"
        )
    return Cut(blocks, head, tail)


def outline(directory: Path) -> Any:
    """Build a checkpoint's causal language model without memory for its weights.

    Raises:
        BaseModelError: the architecture isn't known, or not one that predicts the next token.

    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaseModelError(f"the checkpoint in {directory} can't be loaded: {error}") from error


def part_class(whole: Any, cut: Cut, party: PartyName) -> Any:
    """Give the class of a party's model: that of the whole model, with less in it.

    ``transformers`` looks classes up by their names and modules, so both stay.
    """
    kind = type(whole)

    def build(self: Any, config: Any) -> None:
        kind.__init__(self, config)
        _keep(self, cut, party)

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def full_names(whole: Any, names: Collection[str]) -> dict[str, str]:
    """Map names in a checkpoint to those in the model that ``transformers`` makes of it.

    They can lack the backbone's name, be older, or be of matrices that are joined on loading.

    Args:
        whole: see ``outline``.
        names: of all tensors of the checkpoint.

    """
    changes = get_model_conversion_mapping(whole)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    prefix, expected = whole.base_model_prefix, whole.state_dict()
    result = {}
    for name in sorted(names):
        renamed, _ = rename_source_key(name, renamings, converters, prefix, expected)
        result[name] = name if renamed not in expected and name in expected else renamed
    return result


def tensors_of_part(
    whole: Any, full: Mapping[str, str], cut: Cut, party: PartyName
) -> dict[str, str]:
    """Say which of a checkpoint's tensors a party's model is loaded from.

    Args:
        whole: see ``outline``.
        full: the names of all the checkpoint's tensors; see ``full_names``.
        cut: how many blocks each party has.
        party: whose model.

    Returns:
        The names under which the model is to be given its tensors, to those in the checkpoint. They
        differ only where tied tensors are stored once.

    """
    with torch.device("meta"):
        part = part_class(whole, cut, party)(copy.deepcopy(whole.config))
    owned, stored = part.state_dict().keys(), {model: name for name, model in full.items()}
    result = {name: name for name, model in full.items() if model in owned}
    for pair in whole.all_tied_weights_keys.items():
        for absent, present in (pair, pair[::-1]):
            if absent in owned and absent not in stored and present in stored:
                result[absent] = stored[present]
    return result


def stands_before_blocks(name: str) -> bool:
    """Tell a module that works on embeddings from one that works after the last block."""
    return _BEFORE_BLOCKS.search(name) is not None


def blocks_of(model: Any, blocks: int) -> tuple[Any, str]:
    """Find the list of a causal model's blocks.

    Args:
        model: whole, or a party's.
        blocks: how many it has.

    Returns:
        The module that has the list, and the list's path from the model.

    Raises:
        BaseModelError: its blocks are not one list.

    """
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == blocks:
            return model.get_submodule(path.rpartition(".")[0]), path
    raise BaseModelError(
        f"split learning can't divide {type(model).__name__}: its {blocks} blocks are not one list"
    )


def _keep(model: Any, cut: Cut, party: PartyName) -> None:
    """Take everything out of a model that is not this party's."""
    container, path = blocks_of(model, cut.blocks)
    attribute = path.rpartition(".")[2]
    blocks, own = getattr(container, attribute), nn.ModuleList()
    for number in cut.range_of(party):
        own.add_module(str(number), blocks[number])
    _shorten(model, cut, party)
    for name, module in list(container.named_children()):
        owner = _owner(name)
        if module is not blocks and owner not in {party, None}:
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


def _owner(name: str) -> PartyName | None:
    """Give whose a backbone's module outside the blocks is; None if every party needs it."""
    if "rot" in name:
        return None
    return "head" if stands_before_blocks(name) else "tail"


def _shorten(model: Any, cut: Cut, party: PartyName) -> None:
    """Fit the configuration to a party's blocks: they are counted, and listed, from its first."""
    own = cut.range_of(party)
    for config in _configurations(model):
        if getattr(config, "num_hidden_layers", None) != cut.blocks:
            continue
        for name, value in list(vars(config).items()):
            per_block = isinstance(value, list | tuple) and len(value) == cut.blocks
            if per_block and not name.endswith("_id") and name != "architectures":
                setattr(config, name, value[own.start : own.stop])
        config.num_hidden_layers = len(own)
        config.tie_word_embeddings = False


def _configurations(model: Any) -> Iterator[Any]:
    seen = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in seen:
            seen.add(id(config))
            yield config
