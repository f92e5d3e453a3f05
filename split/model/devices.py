"""Where the server's blocks are: on one device, or spread over several in their order.

Loading a part with such a map makes ``transformers`` dispatch it with ``accelerate``, whose hooks
bring a block's inputs to its device. ``device_map="auto"`` would do nearly the same; here every
block stays in one piece whatever the architecture, the shares follow the memory that is free, and
nothing is ever moved to the processor's memory or to a disk.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from accelerate.utils import send_to_device

from finetuning.model.base_model import BaseModelError
from finetuning.settings import SplitSettings
from split.model.cut import Cut, PartyName, blocks_of, part_class


def body_devices(settings: SplitSettings) -> list[str]:
    """Say which devices the server's blocks are spread over.

    Raises:
        BaseModelError: one that ``split.body-devices`` names isn't there.

    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = [f"cuda:{number}" for number in range(count)]
    named = settings.body_device_names
    absent = [name for name in named if name not in {"cpu", *there}]
    if absent:
        raise BaseModelError(
            f"split.body-devices names {absent[0]}, which the server doesn't have; there are: "
            f"{', '.join(['cpu', *there])}"
        )
    return named or there or ["cpu"]


def device_map(whole: Any, cut: Cut, party: PartyName, devices: Sequence[str]) -> dict[str, str]:
    """Spread a party's blocks over devices, in shares of the memory that is free on each.

    Args:
        whole: see ``split.model.cut.outline``.
        cut: how many blocks each party has.
        party: whose blocks.
        devices: in the order of the blocks; what is no block is on the first.

    Returns:
        Devices by the modules' paths, in the order in which the modules compute.

    """
    if len(devices) == 1:
        return {"": devices[0]}
    _, path = blocks_of(whole, cut.blocks)
    container, _, attribute = path.rpartition(".")
    with torch.device("meta"):
        part = part_class(whole, cut, party)(copy.deepcopy(whole.config))
    result = {}
    for name, module in part.get_submodule(container).named_children():
        if name != attribute and any(True for _ in chain(module.parameters(), module.buffers())):
            result[f"{container}.{name}"] = devices[0]
    blocks = dict(part.get_submodule(path).named_children())
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.values()]
    places = spread(sizes, [_free_memory(device) for device in devices])
    for name, place in zip(blocks, places, strict=True):
        result[f"{path}.{name}"] = devices[place]
    return result


def spread(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Give each block to a device, in order, so that the devices' shares are as their room.

    Args:
        sizes: of the blocks.
        room: of the devices; in any unit.

    Returns:
        The number of each block's device: that in whose share the block's middle is.

    """
    scale = sum(sizes) / sum(room)
    ends = [scale * end for end in accumulate(room)]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [min(sum(middle > end for end in ends), len(room) - 1) for middle in middles]


def hand_over(model: Any, places: Mapping[str, str]) -> None:
    """Let the last block on a device send its output to the next device.

    ``accelerate`` fetches a block's inputs inside the block. With gradient checkpointing that is
    too late: the backward pass draws a block's random numbers again on those devices alone that its
    inputs were on before, and elsewhere its dropout would be another one.

    Args:
        model: a part that was loaded with the map.
        places: see ``device_map``.

    """
    for (path, device), (_, following) in pairwise(places.items()):
        if device != following:
            model.get_submodule(path).register_forward_hook(_sends_to(following))


def _sends_to(device: str) -> Callable[[Any, Any, Any], Any]:
    return lambda module, given, output: send_to_device(output, device)


def _free_memory(device: str) -> int:
    """Give a GPU's free bytes; processors count the same."""
    return torch.cuda.mem_get_info(device)[0] if device.startswith("cuda") else 1
