"""The cells of the attack's tables, and the measurement of each cell."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bench.attack.observed import Seen
from split.protocol.frames import WireType

Attack = Literal["linear", "transformer", "search", "optimisation", "gradient", "loss"]
HEAD_BLOCKS = (0, 1, 2, 3, 6)
NOISE = (0.1, 0.3, 1.0, 3.0, 10.0)
TUNED = (1, 3)  # numbers of head blocks measured with a private adapter


@dataclass(frozen=True)
class Sizes:
    """Amounts of data and computation in each cell.

    Attributes:
        texts: Number of the colluding client's texts for training a decoder.
        longest: Maximum number of attacked tokens of a text, after the common beginning.
        decoded: Number of texts that a decoder reads.
        searched: Number of texts that the search reads.
        optimised: Number of texts that the optimisation reads.
        optimisation_steps: Number of steps of the optimisation.
        labelled: Number of texts whose labels are read from gradients.
        labels: Number of labels to read from each of these texts.
        steps: Number of training steps with noise.
        measured: Number of held-out examples whose loss is measured.
        max_candidates: Maximum number of candidates per token in the search.

    """

    texts: int = 150
    longest: int = 48
    decoded: int = 30
    searched: int = 2
    optimised: int = 1
    optimisation_steps: int = 100
    labelled: int = 1
    labels: int = 12
    steps: int = 8
    measured: int = 12
    max_candidates: int = 4096


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        data: Name of the texts.
        attack: A decoder (linear or Transformer), the search through the public head, optimisation,
            labels from gradients, or the loss of training with noise.
        head_blocks: Number of the client's blocks in the head.
        tail_blocks: Number of the client's blocks in the tail.
        wire: Data type of hidden states and gradients in transit.
        noise: ``split.noise``.
        seen: Input of the attack; "nothing" means random numbers.
        tuned: Whether the client's head has an adapter that the attacker doesn't have.
        seed: Seed of the attack and of the choice of texts, or of training.

    """

    data: str
    attack: Attack
    head_blocks: int = 1
    tail_blocks: int = 1
    wire: WireType = "bfloat16"
    noise: float = 0.0
    seen: Seen = "hidden states"
    tuned: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of the cell's file."""
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:12]
        return f"{self.data}-{self.attack}-{digest}"


def cells_of(data: str, blocks: int, seeds: int, complete: bool) -> Iterator[Cell]:
    """Yield the cells for some texts, grouped by head.

    Args:
        data: Name of the texts.
        blocks: Number of the model's blocks; at least one is in the tail and one in the body.
        seeds: Number of seeds of each cell.
        complete: Whether to include more than the decoders and the search by head blocks.

    """
    heads = [head for head in HEAD_BLOCKS if head + 2 <= blocks]
    by_seed: list[dict[str, Any]] = []
    for head in heads:
        by_seed += [
            {"attack": kind, "head_blocks": head} for kind in ("linear", "transformer", "search")
        ]
        if complete and head:
            by_seed.append({"attack": "optimisation", "head_blocks": head})
    if complete:
        both: tuple[Attack, ...] = ("transformer", "search")
        by_seed += [{"attack": k, "wire": wire} for wire in ("float32", "int8") for k in both]
        by_seed += [{"attack": k, "noise": noise} for noise in NOISE for k in both]
        by_seed += [
            {"attack": "transformer", "seen": seen} for seen in ("encrypted records", "nothing")
        ]
        by_seed += [
            {"attack": "gradient"},
            {"attack": "gradient", "wire": "int8"},
            {"attack": "gradient", "tail_blocks": 2},
            {"attack": "gradient", "noise": 1.0},
        ]
        by_seed += [
            {"attack": k, "head_blocks": head, "tuned": True}
            for head in TUNED
            if head in heads
            for k in both
        ]
        by_seed += [{"attack": "loss", "noise": noise} for noise in (0.0, *NOISE)]
    for settings in by_seed:
        for seed in range(seeds):
            yield Cell(data=data, seed=seed, **settings)
