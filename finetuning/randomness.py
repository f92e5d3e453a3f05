"""Random numbers that depend on what they are for, and not on what was drawn before.

Every stage derives its own seed from the run's seed and its place in the run (client, round, step,
micro-batch). So a resumed run equals an unbroken one, and the order in which micro-batches are
computed doesn't matter.
"""

import hashlib


def derive_seed(*parts: str | int) -> int:
    """Give a seed in [0, 2**63) from the parts, the same on every machine."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
