"""Random numbers that depend on their purpose and not on what was drawn before.

Every stage derives its own seed from the run's seed and its position in the run (client, round,
step, micro-batch, party). Therefore a resumed run equals an unbroken one, and the order in which
micro-batches are computed has no effect.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Torch's generator belongs to the process. Without the lock, threads of two parties in one process
# (simulation, tests) would draw from each other's seeds.
_generator = threading.Lock()


def derive_seed(*parts: str | int) -> int:
    """Derive a seed in [0, 2**63) from the parts, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seed(seed: int) -> None:
    """Seed the generators of the CPU, and of CUDA's GPUs if they are in use.

    ``torch.manual_seed`` does the same, but without a GPU it formats its caller's stack each time,
    which takes a hundred times as long.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Draw from a separate seed within the block; other threads that draw wait until it ends."""
    with _generator:
        set_seed(seed)
        yield


@contextmanager
def drawing_nothing_new() -> Iterator[None]:
    """Protect a backward pass, which resets the generator where it recomputes a forward pass."""
    with _generator:
        yield
