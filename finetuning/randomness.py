"""Random numbers that depend on what they are for, and not on what was drawn before.

Every stage derives its own seed from the run's seed and its place in the run (client, round, step,
micro-batch, party). So a resumed run equals an unbroken one, and the order in which micro-batches
are computed doesn't matter.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Torch's generator belongs to the process. Two parties' threads in one process (a simulation of
# both, a test) would otherwise draw from each other's seeds.
_generator = threading.Lock()


def derive_seed(*parts: str | int) -> int:
    """Give a seed in [0, 2**63) from the parts, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seed(seed: int) -> None:
    """Set the generators of the CPU, and of CUDA's GPUs where they are in use.

    ``torch.manual_seed`` does so too, but formats the stack of its caller each time on a machine
    without a GPU, which takes a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let the block draw from a seed of its own; other threads that draw wait for its end."""
    with _generator:
        set_seed(seed)
        yield


@contextmanager
def drawing_nothing_new() -> Iterator[None]:
    """Guard a backward pass: one that recomputes its forward pass sets the generator back."""
    with _generator:
        yield
