"""Adapters of the whole model from those of its parts, and the way back."""

import re
from collections.abc import Iterable, Mapping

import torch

from finetuning.adapters import State
from split.partition import PARTIES, Cut, PartyName, stands_before_blocks

# The first number in a name is its block's; further ones count experts.
_BLOCK = re.compile(r"\.(\d+)\.")
# Some architectures call their output head an embedding.
_OUTPUT_HEADS = re.compile(r"lm_head|embed_out|output_projection")


def join_adapters(parts: Iterable[Mapping[str, torch.Tensor]]) -> State:
    """Join the adapters of parts to one that fits the whole model.

    Args:
        parts: under whole-model names, as ``Part.trainable`` gives them.

    Returns:
        All tensors, sorted by name; they are not copied.

    Raises:
        ValueError: two parts have a tensor of the same name.

    """
    joined: State = {}
    for part in parts:
        twice = sorted(joined.keys() & part.keys())
        if twice:
            raise ValueError(
                f"two parts have the adapter tensor {twice[0]}: their blocks overlap, so they were "
                "not cut by the same settings"
            )
        joined |= part
    return dict(sorted(joined.items()))


def take_apart(state: Mapping[str, torch.Tensor], cut: Cut) -> dict[PartyName, State]:
    """Give each party its blocks' tensors of a whole model's adapter; they are not copied.

    Raises:
        ValueError: a tensor belongs to no block of the model.

    """
    result: dict[PartyName, State] = {party: {} for party in PARTIES}
    for name, tensor in sorted(state.items()):
        result[_party_of(name, cut)][name] = tensor
    return result


def _party_of(name: str, cut: Cut) -> PartyName:
    block = _BLOCK.search(name)
    if block is None:
        if _OUTPUT_HEADS.search(name):
            return "tail"
        # Not PEFT's own words, which are before and after the adapted module's name.
        module = re.sub(r"\.lora_.*", "", name)
        return "head" if stands_before_blocks(module.rpartition(".")[2]) else "tail"
    party = cut.party_of(int(block[1]))
    if party is None:
        raise ValueError(f"{name} is of a block that this model of {cut.blocks} blocks hasn't")
    return party
