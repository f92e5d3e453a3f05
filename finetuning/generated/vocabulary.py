"""The vocabulary of all generated texts: people, towns, goods, sums, dates and offences.

The styles and the background use the same lists (vocabulary.toml), so that knowledge transfers
between all texts. Only the sentences differ; each style has its own file.
"""

import hashlib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

Split = Literal["train", "test"]


class Offence(NamedTuple):
    """An offence of the Code of the Province; the gerund and the past tense describe the act."""

    name: str
    article: int
    gerund: str
    past: str


def read_texts(name: str) -> dict[str, Any]:
    """Read the word lists and sentences of `<name>.toml`."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


WORDS: dict[str, list[Any]] = read_texts("vocabulary")
OFFENCES = [Offence(**offence) for offence in WORDS.pop("offences")]
WORDS["goods"] = WORDS["durable_goods"] + WORDS["bulk_goods"]


def money(dollars: int) -> str:
    """Format a sum, such as "$2,400" for 2400."""
    return f"${dollars:,}"


def capitalise(sentence: str) -> str:
    """Return the sentence with a capital first letter and the rest unchanged."""
    return sentence[:1].upper() + sentence[1:]


class RandomWords(Random):
    """Draws random words; the draws depend only on the seed, not on the machine."""

    def some_sum(self, lowest: int, highest: int) -> int:
        """Draw a sum from `lowest` to `highest` dollars, both included, in whole hundreds."""
        return self.randint(lowest // 100, highest // 100) * 100

    def word(self, kind: str) -> str:
        """Draw a word from one of the lists in `WORDS`."""
        return str(self.choice(WORDS[kind]))

    def full_name(self) -> str:
        """Draw a full name, such as "Nora Farrow"."""
        return f"{self.word('first_names')} {self.word('surnames')}"

    def date(self, year: int) -> str:
        """Draw a date in `year`, such as "3 March 2015"."""
        return f"{self.randint(1, 28)} {self.word('months')} {year}"

    def facts_in_split(self, split: Split, style: str, *lists: Sequence[str]) -> tuple[str, ...]:
        """Draw one item from each list, such that the combination belongs to `split`.

        Both splits use the same words in different combinations: the training examples can contain
        every word of a held-out example, but never its combination of words.
        """
        while True:
            facts = tuple(self.choice(items) for items in lists)
            digest = hashlib.sha256("\n".join((style, *facts)).encode()).digest()
            # A fixed fifth of all combinations is held out.
            if split == ("test" if int.from_bytes(digest[:4], "big") % 5 == 0 else "train"):
                return facts
