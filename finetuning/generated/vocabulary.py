"""The vocabulary of all generated texts: people, towns, goods, sums, dates and offences.

The styles and the background use the same lists (vocabulary.toml), so that knowledge from one of
them transfers to the others. Only the sentences differ; each style has a file of its own.
"""

import hashlib
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Split = Literal["train", "test"]


class Offence(NamedTuple):
    """An offence of the Code of the Province, with its verb ("took", "taking") and `object`."""

    name: str
    article: int
    taking: str
    took: str
    object: str

    @property
    def gerund(self) -> str:
        """The act as a noun: "secretly taking the property of another person"."""
        return f"{self.taking} {self.object}"

    @property
    def past(self) -> str:
        """The act in the past tense: "secretly took the property of another person"."""
        return f"{self.took} {self.object}"


def read_texts(name: str) -> dict[str, Any]:
    """Read the word lists and sentences of `<name>.toml`."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


WORDS: dict[str, list[Any]] = read_texts("vocabulary")
OFFENCES = [Offence(**offence) for offence in WORDS.pop("offences")]
WORDS["goods"] = WORDS["durable_goods"] + WORDS["bulk_goods"]


def money(dollars: int) -> str:
    """Format a sum, such as "$2,400" for 2400."""
    return f"${dollars:,}"


def some_sum(random_source: random.Random, lowest: int, highest: int) -> int:
    """Draw a sum from `lowest` to `highest` dollars, both included, in whole hundreds."""
    return random_source.randint(lowest // 100, highest // 100) * 100


def full_name(random_source: random.Random) -> str:
    """Draw a full name, such as "Nora Farrow"."""
    return f"{random_source.choice(WORDS['first_names'])} {random_source.choice(WORDS['surnames'])}"


def date(random_source: random.Random, year: int) -> str:
    """Draw a date in `year`, such as "3 March 2015"."""
    return f"{random_source.randint(1, 28)} {random_source.choice(WORDS['months'])} {year}"


def capitalised(sentence: str) -> str:
    """Return the sentence with a capital first letter and the rest unchanged."""
    return sentence[:1].upper() + sentence[1:]


def facts_in_split(
    random_source: random.Random, split: Split, style: str, *lists: Sequence[str]
) -> tuple[str, ...]:
    """Draw one item from each list, such that the combination belongs to `split`.

    Both splits use the same words in different combinations: the training examples contain every
    word of a held-out example, but never its combination.
    """
    while True:
        facts = tuple(random_source.choice(items) for items in lists)
        digest = hashlib.sha256("\n".join((style, *facts)).encode()).digest()
        # A fixed fifth of all combinations is held out.
        if split == ("test" if int.from_bytes(digest[:4], "big") % 5 == 0 else "train"):
            return facts
