"""The number of actors in a simulation: Ray processes that run the clients in turn."""

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from chambers.errors import CommandError
from federation.run_config import RunConfig
from finetuning.model.checkpoint import client_parameters
from finetuning.model.names import TINY, resolve

# Measured with ``tiny``: memory of an actor without the model's weights, and total memory of
# SuperLink, Ray and ServerApp.
_ACTOR_BYTES = 400 * 2**20
_REST_BYTES = 3 * 2**30


@dataclass(frozen=True)
class Machine:
    """Resources that a simulation may use."""

    cores: int
    memory: int  # available memory in bytes
    gpus: int = 0  # number of GPUs that PyTorch can use
    gpu_memory: tuple[int, ...] = ()  # available memory of each GPU; empty if it is unknown


def this_machine() -> Machine:
    """Return the cores, the available memory and the GPUs of this machine."""
    import torch

    gpus = torch.cuda.device_count()
    free: list[int] = []
    if gpus:
        # In another process, because the query creates a context on each GPU.
        query = f"import torch; print(*(torch.cuda.mem_get_info(i)[0] for i in range({gpus})))"
        command = [sys.executable, "-c", query]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
        free = [int(size) for size in output.split()]
    count = getattr(os, "process_cpu_count", os.cpu_count)  # process_cpu_count requires Python 3.13
    memory = psutil.virtual_memory().available
    return Machine(count() or 1, memory, gpus, tuple(free))


def count_actors(config: RunConfig, clients: int, machine: Machine) -> int:
    """Return the number of actors in a simulation.

    If all clients must train concurrently, each has its own actor. Otherwise, clients take turns on
    one actor per GPU (one for all GPUs with ``model.devices = "all"``) or, without GPUs, per core,
    if memory allows. On CPUs, except with fl-glm, each client has its own actor if there are fewer
    than two clients per core, so that no core is idle. Raise ``UserError`` if the model can't be
    downloaded, or if the schedule requires that all clients train concurrently and this machine
    can't simulate that.
    """
    in_memory = in_memory_of(config, machine)
    by_flower = min(machine.cores + 4, 32)  # the size of Flower 1.41's thread pool
    split = config.split
    if not trains_at_once(config):
        at_most = min(in_memory, by_flower, 2 * machine.cores - 1)
        if config.strategy != "fl-glm" and not machine.gpus and clients <= at_most:
            return clients
        if machine.gpus and config.model.devices == "all":
            return 1
        return min(clients, machine.gpus or machine.cores, machine.cores, in_memory)
    if clients > min(in_memory, by_flower):
        what = f'split.schedule = "{split.schedule}"'
        if split.average_every:
            what += " with split.average-every"
        raise CommandError(
            f"{what} trains all {clients} clients at once, but this machine can simulate only "
            f"{min(in_memory, by_flower)}: its available memory is enough for {in_memory}, and "
            f"Flower runs at most {by_flower} on {machine.cores} cores. Simulate fewer clients "
            '(--clients N), or use split.schedule = "serial"'
        )
    return clients


def in_memory_of(config: RunConfig, machine: Machine) -> int:
    """Return the number of actors that fit in a machine's memory."""
    return max(1, (machine.memory - _REST_BYTES) // (_ACTOR_BYTES + _weight_bytes(config)))


def trains_at_once(config: RunConfig) -> bool:
    """Return whether clients wait for each other within a round, so that all must train at once."""
    split = config.split
    waits = split.schedule == "hierarchical" and split.average_every > 0
    return config.strategy == "fl-glm" and (split.schedule == "client-batch" or waits)


def gpus_of_each(actors: int, gpus: int) -> float:
    """Return the number of GPUs per actor, a fraction if there are more actors than GPUs.

    Ray can't assign parts of two GPUs to one actor. Ray's smallest unit is 0.0001 GPU.
    """
    if not gpus:
        return 0.0
    return gpus // actors or 10_000 // math.ceil(actors / gpus) / 10_000


def checkpoint_of(config: RunConfig) -> Path | None:
    """Return the base model's checkpoint, downloaded if necessary; None for ``tiny``."""
    if config.model.name == TINY:
        return None
    from finetuning.model.base_model import fetch

    name = resolve(config.model.name)
    path = Path(name).expanduser()
    # Download the checkpoint now; otherwise several actors would download it concurrently.
    return path if path.is_absolute() else fetch(name)


def _weight_bytes(config: RunConfig) -> int:
    """Return the size of a client's frozen weights in bytes; 0 for ``tiny`` (negligible)."""
    checkpoint = checkpoint_of(config)
    if checkpoint is None:
        return 0
    split = config.strategy == "fl-glm"
    blocks = config.split.head_blocks + config.split.tail_blocks if split else None
    width = 2 if config.model.dtype == "bfloat16" else 4
    return width * client_parameters(checkpoint, blocks)
