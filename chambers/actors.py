"""The number of actors in a simulation (Ray processes that run clients), and their GPU memory."""

import math
import os
import subprocess
import sys
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path

import psutil

from chambers.errors import CommandError
from federation.run_config import RunConfig
from finetuning.model.checkpoint import client_parameters, count_blocks, hidden_size
from finetuning.model.names import TINY, resolve

# Measured with ``tiny``: memory of an actor without the model's weights, and total memory of
# SuperLink, Ray and ServerApp.
_ACTOR_BYTES = 400 * 2**20
_REST_BYTES = 3 * 2**30
# Memory of a process before it loads a model: CUDA's context, and kernels of libraries (on an H100,
# 750 to 780 MiB).
_CONTEXT = 800 * 2**20
# Bytes per weight of a block; other weights are never quantised.
_QUANTISED = {"nf4": 0.53, "int8": 1.0}
# Bytes of activations per token, block and hidden unit that a training step stores, divided by the
# bytes of a value. For a Llama on an H100 in bfloat16, 20 were measured with LoRA on queries, keys
# and values, 23 with dropout, and 24 with LoRA on all linear layers, where dropout would add about
# 10. On CPUs in float32, 45 include what glibc keeps of freed memory (docs/measurements.md):
# a client of SmolLM2 with rows of up to 170, 410 and 800 tokens needed 2.2, 3.2 and 6.5 GiB.
_STORED, _STORED_ON_CPU = 33.5, 45.0


@dataclass(frozen=True)
class Machine:
    """Resources that a simulation may use."""

    cores: int
    memory: int  # available memory in bytes
    gpus: int = 0  # number of GPUs that PyTorch can use
    gpu_memory: tuple[int, ...] = ()  # available memory of each GPU; empty if it is unknown


def this_machine() -> Machine:
    """Return the cores, the available memory and the GPUs of this machine."""
    from finetuning.devices import count_accelerators

    gpus = count_accelerators()
    free: list[int] = []
    if gpus:
        # In another process, because the query creates a context on each GPU.
        each = f"torch.accelerator.get_memory_info(i)[0] for i in range({gpus})"
        query = f"import torch; print(*({each}))"
        command = [sys.executable, "-P", "-c", query]
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
    if not config.trains_at_once:
        at_most = min(in_memory, by_flower, 2 * machine.cores - 1)
        if not config.method.is_split and not machine.gpus and clients <= at_most:
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
    checkpoint = find_base_checkpoint(config)
    if checkpoint is None:
        return max(1, (machine.memory - _REST_BYTES) // _ACTOR_BYTES)
    client, server = _estimate(config, checkpoint, actors=1, on_gpu=False)
    if machine.gpus:  # only the weights are in main memory, while they are loaded
        client, server = replace(client, activations=0), None
    # How much the server stores for each client depends on the schedule.
    rest = _REST_BYTES + (server.weights if server else 0)
    return max(1, (machine.memory - rest) // client.total)


def gpus_of_each(actors: int, gpus: int) -> float:
    """Return the number of GPUs per actor, a fraction if there are more actors than GPUs.

    Ray can't assign parts of two GPUs to one actor. Ray's smallest unit is 0.0001 GPU.
    """
    if not gpus:
        return 0.0
    return gpus // actors or 10_000 // math.ceil(actors / gpus) / 10_000


def resources_of(actors: int, gpus: int = 0) -> str:
    """Return the resources of actors on this machine, which share the GPUs, as options of Flower.

    Ray starts one actor per CPU, so the number of CPUs is that of the actors. By default, Flower
    assigns 2 CPUs to each client, and hides all GPUs.
    """
    return (
        f"client-resources-num-cpus=1 client-resources-num-gpus={gpus_of_each(actors, gpus)} "
        f"init-args-num-cpus={actors} init-args-num-gpus={gpus}"
    )


def find_base_checkpoint(config: RunConfig) -> Path | None:
    """Return the base model's checkpoint, downloaded if necessary; None for ``tiny``."""
    if config.model.name == TINY:
        return None
    from finetuning.model.locating import fetch

    name = resolve(config.model.name)
    path = Path(name).expanduser()
    # Download the checkpoint now; otherwise several actors would download it concurrently.
    return path if path.is_absolute() else fetch(name)


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of one process in bytes, without adapters and their optimizers."""

    context: int
    weights: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(astuple(self))

    def __str__(self) -> str:
        named = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in asdict(self).items())
        return f"about {self.total / 2**30:.1f} GiB ({named})"


def describe_memory(config: RunConfig, checkpoint: Path, actors: int, machine: Machine) -> str:
    """Describe how much memory clients and server need, that of GPUs if there are any.

    Raise ``CommandError`` if not even their contexts and weights fit. The run isn't refused if only
    the activations don't fit, because their size is an estimate.
    """
    on_gpu = bool(machine.gpu_memory)
    free = machine.gpu_memory or (machine.memory - _REST_BYTES,)
    client, server = _estimate(config, checkpoint, actors, on_gpu)
    if config.model.devices == "all":
        free = (sum(free),)
    each = math.ceil(actors / len(free))
    text = f"{'GPU memory' if on_gpu else 'memory'}: {client} for a client"
    fixed, total = each * (client.context + client.weights), each * client.total
    if server is not None:
        text += f", and {server} for the server"
        fixed += server.context + server.weights // len(free)
        total += server.context + (server.total - server.context) // len(free)
    where = "on a GPU" if on_gpu else "at once"
    text += f"; {min(free) / 2**30:.1f} GiB are free for {each} clients {where}"
    if fixed > min(free):
        raise CommandError(
            f'{text}. Use a smaller model, model.quantization = "nf4", or fewer clients at once'
        )
    if total > min(free):
        text += (
            ". This may not be enough: if a client runs out of memory, lower train.batch-size or "
            "data.max-length, or set model.gradient-checkpointing = true"
        )
    return text


def _estimate(
    config: RunConfig, checkpoint: Path, actors: int, on_gpu: bool
) -> tuple[ProcessMemory, ProcessMemory | None]:
    """Estimate a client's memory and, if it has blocks, the server's, which all GPUs share.

    The server stores activations for at most ``actors`` clients at once.
    """
    blocks = count_blocks(checkpoint) or 0
    memory = partial(_memory, config, checkpoint, on_gpu)
    if not config.method.is_split:
        return memory(blocks, tokens=config.max_training_tokens, ends=True), None
    theirs = config.split.head_blocks + config.split.tail_blocks
    in_flight = min(config.split.window, config.train.accumulation)
    tokens = in_flight * config.max_training_tokens
    client = memory(theirs, tokens=tokens, ends=True)
    if config.split.body_hosts:
        return client, None
    others = max(0, blocks - theirs)  # the number of blocks may be unknown
    tokens = min(config.split.activation_budget, actors * tokens)
    return client, memory(others, tokens=tokens, ends=False)


def _memory(
    config: RunConfig, checkpoint: Path, on_gpu: bool, blocks: int, tokens: int, ends: bool
) -> ProcessMemory:
    """Estimate the memory of a process with some blocks and, if ``ends``, the embedding and head.

    ``tokens`` is the number of padded tokens whose activations are stored at once.
    """
    is_wide = config.model.dtype == "float32" or (config.model.dtype == "auto" and not on_gpu)
    width = 4 if is_wide else 2
    other = client_parameters(checkpoint, 0)
    in_blocks = client_parameters(checkpoint, blocks) - other
    weights = in_blocks * _QUANTISED.get(config.model.quantization, width) + ends * other * width
    per_block = tokens * hidden_size(checkpoint) * width
    stored = _STORED if on_gpu else _STORED_ON_CPU
    activations = int(per_block * stored * blocks)
    if config.model.gradient_checkpointing:  # stores each block's input, and recomputes one block
        activations = int(per_block * (blocks + stored))
    return ProcessMemory(_CONTEXT if on_gpu else _ACTOR_BYTES, int(weights), activations)
