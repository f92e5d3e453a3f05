"""Random numbers that depend on their purpose, not on earlier draws.

Each stage derives its own seed from the run's seed and its position in the run (client, round,
step, micro-batch, party). Therefore a resumed run equals an uninterrupted one, and the order in
which micro-batches are processed has no effect. Only the noise of differential privacy is secret.
"""

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

# Function that returns the given number of random bytes, such as ``os.urandom``.
RandomBytes = Callable[[int], bytes]

# Torch has one generator per process. Without the lock, the threads of two parties in one process
# (simulation, tests) would use each other's seeds. A backward pass needs the lock, too: it may set
# the generator to recompute activations.
generator_lock = threading.Lock()


def derive_seed(*parts: str | int) -> int:
    """Return a seed in [0, 2**63) that depends only on the parts, not on the machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def set_seed(seed: int) -> None:
    """Seed the generators of the CPU and of all accelerators.

    Without an accelerator, ``torch.manual_seed`` formats the caller's stack each time, which takes
    a hundred times as long as seeding.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Seed the generators within the context, which only one thread at a time can enter."""
    with generator_lock:
        set_seed(seed)
        yield


def secret_stream(key: bytes, seed: int) -> RandomBytes:
    """Return a source of bytes that can be reproduced only with the 32-byte key (AES-CTR).

    The sources of different seeds are independent.
    """
    counter = modes.CTR(seed.to_bytes(8, "big") + bytes(8))
    cipher = Cipher(algorithms.AES(key), counter).encryptor()
    return lambda count: cipher.update(bytes(count))


def normal(count: int, random_bytes: RandomBytes) -> torch.Tensor:
    """Draw standard normal numbers as float64 (Box and Muller, 1958)."""
    half = (count + 1) // 2
    radius = (-2 * torch.log1p(-uniform(half, random_bytes))).sqrt()
    angle = 2 * math.pi * uniform(half, random_bytes)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def uniform(count: int, random_bytes: RandomBytes) -> torch.Tensor:
    """Draw numbers from [0, 1) as float64, with 53 random bits each."""
    bits = torch.frombuffer(bytearray(random_bytes(8 * count)), dtype=torch.int64)
    return (bits & (2**53 - 1)).double() * 2.0**-53
