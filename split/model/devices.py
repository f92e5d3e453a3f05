"""Devices of the server's blocks: one device, or several with consecutive blocks on each."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from finetuning.errors import BaseModelError
from finetuning.model.placement import accelerators, device_map
from split.model.partition import Partition, PartyName, blocks_of, part_class
from split.settings import SplitSettings


def body_devices(settings: SplitSettings) -> list[str]:
    """Return the devices over which the server's blocks are spread.

    Raise a BaseModelError if a device in ``split.body-devices`` does not exist.
    """
    there = accelerators()
    named = settings.body_device_names
    absent = [name for name in named if name not in {"cpu", *there}]
    if absent:
        raise BaseModelError(
            f"split.body-devices names {absent[0]}, which the server doesn't have; available: "
            f"{', '.join(['cpu', *there])}"
        )
    return named or there or ["cpu"]


def map_of_part(
    whole: Any, partition: Partition, party: PartyName, devices: Sequence[str]
) -> dict[str, str]:
    """Return the `device_map` of a party's part. ``whole`` is the result of `outline`."""
    with torch.device("meta"):
        part = part_class(whole, partition, party)(copy.deepcopy(whole.config))
    return device_map(part, blocks_of(whole, partition.blocks), devices)
