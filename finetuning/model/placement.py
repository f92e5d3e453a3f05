"""Several devices for one model, with consecutive blocks on each.

A model that is loaded with a device map is dispatched with ``accelerate``, whose hooks move a
block's inputs to its device. Unlike with ``device_map="auto"``, blocks are never divided, shares
are proportional to the free memory, and nothing is offloaded to the CPU or a disk.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import nn


def accelerators() -> list[str]:
    """Return the accelerators that PyTorch finds, such as ``cuda:0``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    return [f"{accelerator.type}:{number}" for number in range(count)] if accelerator else []


def path_of_blocks(model: Any, blocks: int) -> str | None:
    """Return the path of the ``ModuleList`` of a model's blocks; None if there is no such list."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == blocks:
            return str(path)
    return None


def device_map(model: Any, path: str, devices: Sequence[str]) -> dict[str, str]:
    """Spread a model's blocks over devices, in proportion to the free memory on each.

    All other modules are on the first device. ``path`` is the path of the list of blocks. Return a
    map from modules' paths to devices, in the order in which the modules run.
    """
    if len(devices) == 1:
        return {"": devices[0]}
    container, _, attribute = path.rpartition(".")
    before: list[str] = []
    after: list[str] = []
    names = container.split(".")
    for depth in range(len(names), -1, -1):
        parent = ".".join(names[:depth])
        inner = names[depth] if depth < len(names) else attribute
        first = True
        for name, module in model.get_submodule(parent).named_children():
            if name == inner:
                first = False
            elif any(True for _ in chain(module.parameters(), module.buffers())):
                full = f"{parent}.{name}" if parent else name
                # Rotary embeddings, which run before the blocks, may be defined after them.
                (before if first or "rot" in name else after).append(full)
    blocks = dict(model.get_submodule(path).named_children())
    sizes = [sum(p.numel() for p in block.parameters()) for block in blocks.values()]
    places = zip(blocks, assign_blocks(sizes, [_room(device) for device in devices]), strict=True)
    return (
        dict.fromkeys(before, devices[0])
        | {f"{path}.{name}": devices[number] for name, number in places}
        | dict.fromkeys(after, devices[0])
    )


def _room(device: str) -> int:
    """Return the free memory of a device in bytes; 1 for the CPU, which only tests use twice."""
    if device.startswith("cpu"):
        return 1
    free, _ = torch.get_device_module(device).mem_get_info(device)
    return int(free)


def assign_blocks(sizes: Sequence[int], room: Sequence[int]) -> list[int]:
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

            def send(_: Any, inputs: Any, output: Any, device: str = following) -> Any:
                return send_to_device(output, device)

            model.get_submodule(path).register_forward_hook(send)
