"""Devices of the server's blocks: one device, or several with consecutive blocks on each.

If a part is loaded with a device map, ``transformers`` dispatches it with ``accelerate``, whose
hooks move a block's inputs to its device. Unlike with ``device_map="auto"``, blocks are never
divided, shares are proportional to the free memory, and nothing is offloaded to the CPU or a disk.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from accelerate.utils import send_to_device

from finetuning.model.base_model import BaseModelError
from split.model.partition import Partition, PartyName, blocks_of, part_class
from split.settings import SplitSettings


def body_devices(settings: SplitSettings) -> list[str]:
    """Return the devices over which the server's blocks are spread.

    Raise a BaseModelError if a device in ``split.body-devices`` does not exist.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = [f"cuda:{number}" for number in range(count)]
    named = settings.body_device_names
    absent = [name for name in named if name not in {"cpu", *there}]
    if absent:
        raise BaseModelError(
            f"split.body-devices names {absent[0]}, which the server doesn't have; available: "
            f"{', '.join(['cpu', *there])}"
        )
    return named or there or ["cpu"]


def device_map(
    whole: Any, partition: Partition, party: PartyName, devices: Sequence[str]
) -> dict[str, str]:
    """Spread a party's blocks over devices, in proportion to the free memory on each.

    All other modules are on the first device. ``whole`` is the result of `outline`. Return a map
    from modules' paths to devices, in the order in which the modules run.
    """
    if len(devices) == 1:
        return {"": devices[0]}
    path = blocks_of(whole, partition.blocks)
    container, _, attribute = path.rpartition(".")
    with torch.device("meta"):
        part = part_class(whole, partition, party)(copy.deepcopy(whole.config))
    result = {}
    for name, module in part.get_submodule(container).named_children():
        if name != attribute and any(True for _ in chain(module.parameters(), module.buffers())):
            result[f"{container}.{name}"] = devices[0]
    blocks = dict(part.get_submodule(path).named_children())
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.values()]
    # Free bytes of each GPU; only tests use several CPU devices.
    room = [torch.cuda.mem_get_info(d)[0] if d.startswith("cuda") else 1 for d in devices]
    for name, number in zip(blocks, spread(sizes, room), strict=True):
        result[f"{path}.{name}"] = devices[number]
    return result


def spread(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
    """Assign consecutive blocks to devices, in proportion to the free memory of each device.

    Return the index of each block's device: the device whose share contains the block's midpoint.
    The sizes of blocks and the free memory (``room``) may have different units.
    """
    scale = sum(sizes) / sum(room)
    shares = [scale * end for end in accumulate(room)]
    middles = [end - size / 2 for end, size in zip(accumulate(sizes), sizes, strict=True)]
    return [min(sum(middle > end for end in shares), len(room) - 1) for middle in middles]


def hand_over(model: Any, devices: Mapping[str, str]) -> None:
    """Make the last block on each device move its output to the next device.

    ``accelerate`` moves a block's inputs inside the block, which is too late for gradient
    checkpointing: the backward pass restores the random state only on the devices of the inputs, so
    dropout on other devices would differ. ``devices`` is the result of `device_map`, with
    which the model was loaded.
    """
    for (path, device), (_, following) in pairwise(devices.items()):
        if device != following:

            def send(_: Any, given: Any, output: Any, device: str = following) -> Any:
                return send_to_device(output, device)

            model.get_submodule(path).register_forward_hook(send)
