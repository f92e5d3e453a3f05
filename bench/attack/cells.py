"""The cells of the attack's tables: which measurements there are, and their settings."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from bench.attack.observed import Observed
from split.protocol.frames import WireType

# What is measured: a decoder (linear or Transformer), the search through the public head, labels
# read from gradients, or the loss before and after training with noise.
Attack = Literal["linear", "transformer", "search", "gradient", "loss"]
HEAD_BLOCKS = (0, 1, 2, 3, 6)
NOISE = (0.1, 0.3, 1.0, 3.0, 10.0)
TUNED = (1, 3)  # numbers of head blocks with which a private adapter is measured


@dataclass(frozen=True)
class Sizes:
    """Amounts of data and computation in each cell."""

    texts: int = 150  # number of the colluding client's texts, for training a decoder
    longest: int = 48  # maximum number of attacked tokens per text, after the common beginning
    decoded: int = 30  # number of texts to reconstruct with a decoder
    searched: int = 2  # number of texts to reconstruct by search
    labelled: int = 1  # number of texts whose labels are read from gradients
    labels: int = 12  # number of labels to read per text: the last ones
    steps: int = 8  # number of steps of training with noise
    measured: int = 12  # number of held-out examples whose loss is measured
    max_candidates: int = 4096  # maximum number of candidates per token in the search


@dataclass(frozen=True)
class Cell:
    """The settings of one measurement."""

    data: str  # name of the texts
    attack: Attack
    head_blocks: int = 1
    tail_blocks: int = 1
    wire: WireType = "bfloat16"  # data type of hidden states and gradients in transit
    noise: float = 0.0  # ``split.noise``
    seen: Observed = "hidden states"  # input of the attack; "nothing" means random numbers
    tuned: bool = False  # whether the client's head has an adapter that the attacker lacks
    seed: int = 0  # seed of the attack and of the choice of texts, or of training


def cells_of(data: str, blocks: int, seeds: int, complete: bool) -> Iterator[Cell]:
    """Yield the cells for some texts; each is measured with ``seeds`` different seeds.

    At least one of the model's ``blocks`` is left for the body, and one for the tail. Unless
    ``complete``, only the decoders and the search are measured, by number of head blocks.
    """
    heads = [head for head in HEAD_BLOCKS if head + 2 <= blocks]
    by_seed: list[dict[str, Any]] = []
    for head in heads:
        kinds = ("linear", "transformer", "search")
        by_seed += [{"attack": kind, "head_blocks": head} for kind in kinds]
    if complete:
        both: tuple[Attack, ...] = ("transformer", "search")
        by_seed += [{"attack": k, "wire": wire} for wire in ("float32", "int8") for k in both]
        by_seed += [{"attack": k, "noise": noise} for noise in NOISE for k in both]
        by_seed += [
            {"attack": "transformer", "seen": "encrypted records"},
            {"attack": "transformer", "seen": "nothing"},
            {"attack": "gradient"},
            {"attack": "gradient", "wire": "int8"},
            {"attack": "gradient", "tail_blocks": 2},
            {"attack": "gradient", "noise": 1.0},
        ]
        tuned = [head for head in TUNED if head in heads]
        by_seed += [
            {"attack": k, "head_blocks": head, "tuned": True} for head in tuned for k in both
        ]
        by_seed += [{"attack": "loss", "noise": noise} for noise in (0.0, *NOISE)]
    for settings in by_seed:
        for seed in range(seeds):
            yield Cell(data=data, seed=seed, **settings)
