"""Merge the adapters of parts into one adapter of the whole model, and split such an adapter."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

import torch

from finetuning.adapters.adapter import State
from finetuning.adapters.prefixes import SAVED, name_of_block
from finetuning.model.fingerprint import digest_tensor
from finetuning.settings import AdapterSettings
from split.model.partition import PARTIES, Partition, PartyName, stands_before_blocks

# The first number in a name is the index of the block. Further numbers are indices of experts.
_BLOCK = re.compile(r"\.(\d+)\.")
_PREFIX = re.compile(rf"{SAVED}\.(\d+)")
# Some architectures call their output head an embedding.
_OUTPUT_HEADS = re.compile(r"lm_head|embed_out|output_projection")


def join_adapters(parts: Iterable[Mapping[str, torch.Tensor]]) -> State:
    """Merge the adapters of parts (see `Part.trainable`) into one adapter of the whole model.

    Tensors are sorted by name, and are not copied, except that the prefixes of the blocks are
    concatenated into one tensor. Raise a ValueError if two parts have a tensor of the same name, or
    a block's prefix is missing.
    """
    joined: State = {}
    for part in parts:
        twice = sorted(joined.keys() & part.keys())
        if twice:
            raise ValueError(
                f"two parts have the adapter tensor {twice[0]}: their blocks overlap, so the parts "
                "were not created with the same settings"
            )
        joined |= part
    # Concatenate the prefixes of blocks into one tensor, the format in which PEFT saves them.
    prefixes = {int(m[1]): joined.pop(m[0]) for name in [*joined] if (m := _PREFIX.fullmatch(name))}
    if prefixes:
        missing = set(range(max(prefixes))) - prefixes.keys()
        if missing:
            raise ValueError(f"no part has the prefix of block {min(missing)}")
        joined[SAVED] = torch.cat([prefixes[block] for block in sorted(prefixes)], dim=1)
    return dict(sorted(joined.items()))


def take_apart(state: Mapping[str, torch.Tensor], partition: Partition) -> dict[PartyName, State]:
    """Split an adapter of the whole model by party.

    The tensors are not copied, except that a prefix is divided into one tensor per block. Raise a
    ValueError if a tensor belongs to no block of the model, or a prefix can't be divided.
    """
    result: dict[PartyName, State] = {party: {} for party in PARTIES}
    for name, tensor in sorted(state.items()):
        if name != SAVED:
            result[_party_of(name, partition)][name] = tensor
            continue
        if tensor.shape[1] % partition.blocks:
            raise ValueError(
                f"a prefix of {tensor.shape[1]} columns can't be divided among the model's "
                f"{partition.blocks} blocks"
            )
        prefixes = tensor.chunk(partition.blocks, dim=1)
        for party in PARTIES:
            for block in partition.range_of(party):
                result[party][name_of_block(block)] = prefixes[block].contiguous()
    return result


def body_digest(settings: AdapterSettings, state: Mapping[str, torch.Tensor] | None) -> str:
    """Return a digest that lets client and server verify that they use the same body adapters.

    The digest covers kind, scale and weights. If ``state`` is None or empty, return "none".
    """
    if not state:
        return "none"
    facts = [settings.kind, settings.alpha if settings.kind == "lora" else 0]
    digests = {
        name: digest_tensor(value.dtype, value.shape, [value]) for name, value in state.items()
    }
    return hashlib.sha256(json.dumps([facts, digests], sort_keys=True).encode()).hexdigest()


def _party_of(name: str, partition: Partition) -> PartyName:
    block = _BLOCK.search(name)
    if block is None:
        if _OUTPUT_HEADS.search(name):
            return "tail"
        # Remove the parts of the name that PEFT adds before and after the name of the module.
        module = re.sub(r"\.lora_.*", "", name)
        return "head" if stands_before_blocks(module.rpartition(".")[2]) else "tail"
    for party in PARTIES:
        if int(block[1]) in partition.range_of(party):
            return party
    # Extra prediction layers follow the last block.
    raise ValueError(f"{name} belongs to none of the model's {partition.blocks} blocks")
