"""Estimates of the GPU memory that the processes of a simulation need."""

import math
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

from chambers.errors import CommandError
from federation.run_config import RunConfig
from finetuning.model.checkpoint import client_parameters, count_blocks, hidden_size

# Memory of a process before it loads a model: CUDA's context, and kernels of libraries (on an H100,
# 750 to 780 MiB).
_CONTEXT = 800 * 2**20
# Bytes per weight of a block; other weights are never quantised.
_QUANTISED = {"nf4": 0.53, "int8": 1.0}
# Bytes of activations per token, block and hidden unit that a training step in bfloat16 stores.
# For a Llama on an H100, 39 bytes were measured with LoRA on queries, keys and values, 46 with
# dropout, and 47 with LoRA on all linear layers, where dropout would add about 20 bytes.
_STORED = 67


@dataclass(frozen=True)
class GpuMemory:
    """GPU memory of one process in bytes, without adapters and their optimizers."""

    context: int
    weights: int
    activations: int  # 0 if the hidden size is unknown, as with GGUF files

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(astuple(self))

    def __str__(self) -> str:
        named = ", ".join(
            f"{name} {size / 2**30:.1f}" if size else f"and {name}"
            for name, size in asdict(self).items()
        )
        return f"about {self.total / 2**30:.1f} GiB ({named})"


def plan(config: RunConfig, checkpoint: Path, actors: int, free: Sequence[int]) -> str:
    """Describe how much GPU memory clients and server need; ``free`` is in bytes per GPU.

    Raise ``CommandError`` if not even their contexts and weights fit. The run isn't refused if only
    the activations don't fit, because their size is an estimate.
    """
    client, server = _estimate(config, checkpoint)
    if config.model.devices == "all":
        free = [sum(free)]
    each = math.ceil(actors / len(free))
    text = f"GPU memory: {client} for a client"
    fixed, total = each * (client.context + client.weights), each * client.total
    if server is not None:
        text += f", and {server} for the server"
        fixed += _CONTEXT + server.weights // len(free)
        total += _CONTEXT + (server.total - _CONTEXT) // len(free)
    text += f"; {min(free) / 2**30:.1f} GiB are free for {each} clients on a GPU"
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


def _estimate(config: RunConfig, checkpoint: Path) -> tuple[GpuMemory, GpuMemory | None]:
    """Estimate a client's memory and, if it has blocks, the server's, which all GPUs share."""
    blocks = count_blocks(checkpoint) or 0
    if config.strategy != "fl-glm":
        return _memory(config, checkpoint, blocks, tokens=config.longest, ends=True), None
    theirs = config.split.head_blocks + config.split.tail_blocks
    client = _memory(
        config, checkpoint, theirs, tokens=config.split.window * config.longest, ends=True
    )
    if config.split.body_hosts:
        return client, None
    budget = config.split.activation_budget
    others = max(0, blocks - theirs)  # the number of blocks may be unknown
    return client, _memory(config, checkpoint, others, tokens=budget, ends=False)


def _memory(config: RunConfig, checkpoint: Path, blocks: int, tokens: int, ends: bool) -> GpuMemory:
    """Estimate the memory of a process with some blocks and, if ``ends``, the embedding and head.

    ``tokens`` is the number of padded tokens whose activations are stored at once.
    """
    width = 4 if config.model.dtype == "float32" else 2
    other = client_parameters(checkpoint, 0)
    in_blocks = client_parameters(checkpoint, blocks) - other
    weights = in_blocks * _QUANTISED.get(config.model.quantization, width) + ends * other * width
    per_block = tokens * hidden_size(checkpoint) * width // 2
    activations = per_block * _STORED * blocks
    if config.model.gradient_checkpointing:  # stores each block's input, and recomputes one block
        activations = per_block * (2 * blocks + _STORED)
    return GpuMemory(_CONTEXT, int(weights), activations)
