"""Questions of law that only an institution with cases of the same matter has seen answered.

Each of twelve matters has one Article of the Code of the Province, and its questions tell neither
the Article nor the rule. The institutions divide the matters: what one knows of another's can only
come from training together.
"""

from collections.abc import Sequence
from random import Random

from finetuning.generated.vocabulary import WORDS, Split, facts_in_split, read_texts

_TEXTS = read_texts("matters")
MATTERS: tuple[str, ...] = tuple(_TEXTS["matters"])


def divide(institutions: int, seed: int) -> list[list[str]]:
    """Return each institution's matters: all of them shuffled, and divided evenly.

    Raises:
        ValueError: There are more institutions than matters.

    """
    if institutions > len(MATTERS):
        raise ValueError(f"{len(MATTERS)} matters can't be divided among {institutions} clients")
    shuffled = Random(f"matters {seed}").sample(MATTERS, len(MATTERS))
    return [shuffled[number::institutions] for number in range(institutions)]


def questions(matters: Sequence[str], count: int, seed: int, split: Split) -> list[dict[str, str]]:
    """Return `count` rows that take turns with the matters, as `examples` returns those of a style.

    No surname meets the same matter in both splits.
    """
    random_source = Random(f"questions {split} {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < count:
        row = _row(random_source, matters[len(rows) % len(matters)], split)
        rows.setdefault(row["input"], row)
    return list(rows.values())


def _row(random_source: Random, matter: str, split: Split) -> dict[str, str]:
    case, choice = _TEXTS["matters"][matter], random_source.choice
    _, surname = facts_in_split(random_source, split, "matters", (matter,), WORDS["surnames"])
    name, town = f"{choice(WORDS['first_names'])} {surname}", choice(WORDS["towns"])
    return {
        "instruction": "",
        "input": choice(case["questions"]).format(name=name, town=town),
        "output": _TEXTS["answer"].format(**case),
    }


def article(matter: str) -> int:
    """Return the number of a matter's Article."""
    return int(_TEXTS["matters"][matter]["article"])


def beginnings() -> dict[int, str]:
    """Return the beginning of an answer for each Article, by its number."""
    text = _TEXTS["answer"].partition(",")[0] + ","
    return {article(matter): text.format(article=article(matter)) for matter in MATTERS}
