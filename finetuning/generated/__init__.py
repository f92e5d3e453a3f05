"""Text of three institutions in three styles, and neutral text, generated from word lists.

It stands in for the private data of figure 1 of the FedJudge paper where no file and no network
may be needed: a court that writes views, a consultancy that answers laypeople and a school of
law that reasons step by step. The same people, towns, offences and sums occur in all of them,
in clearly shifted styles. `background` is what a model may be pre-trained on beforehand.
"""

import random
from typing import get_args

from finetuning.generated import background as background_text
from finetuning.generated import consultation, court, reasoning
from finetuning.generated.vocabulary import Split

__all__ = ["STYLES", "background", "examples"]

STYLES: tuple[str, ...] = ("court", "consultation", "reasoning")

_WRITERS = {
    "court": court.example,
    "consultation": consultation.example,
    "reasoning": reasoning.example,
}
# So many rows in a row that all exist already mean that there are hardly any others.
_PATIENCE = 2_000


def examples(style: str, count: int, seed: int, split: Split) -> list[dict[str, str]]:
    """Give `count` rows of a style, each with the keys instruction, input and output.

    The rows depend on the arguments alone, whatever the machine, and no two share an input. A
    smaller count gives the first rows of a larger one. Rows of "train" and of "test" share
    words and phrases, but neither an input nor the facts that an input rests on, whatever
    their seeds and counts.

    Raises ValueError for an unknown style or split, and for a count of more rows than the
    style can tell apart, which is above 20,000 for each split of each style.
    """
    if style not in STYLES:
        raise ValueError(f"unknown style {style!r}, expected one of {', '.join(STYLES)}")
    if split not in get_args(Split):
        raise ValueError(f"unknown split {split!r}, expected one of {', '.join(get_args(Split))}")
    random_source = random.Random(f"{style} {split} {seed}")
    rows: dict[str, dict[str, str]] = {}
    repeated = 0
    while len(rows) < count:
        row = _WRITERS[style](random_source, split)
        repeated = repeated + 1 if row["input"] in rows else 0
        if repeated > _PATIENCE:
            raise ValueError(f"cannot write {count} different rows in the style {style}")
        rows.setdefault(row["input"], row)
    return list(rows.values())


def background(count: int, seed: int) -> list[str]:
    """Give `count` different neutral passages of some 60 to 200 words each.

    They depend on the arguments alone. They use the vocabulary of the styles, but not their
    phrases, so that they teach a model the language and leave the styles to be learned.
    """
    random_source = random.Random(f"background {seed}")
    passages: dict[str, None] = {}
    while len(passages) < count:
        passages.setdefault(background_text.passage(random_source))
    return list(passages)
