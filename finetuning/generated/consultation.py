"""Consultations: a layperson's short question and a consultant's friendly answer.

After figure 1(b) of the FedJudge paper: an everyday problem in a few colloquial words, and plain
advice that repeats the subject and its extent, and says where to get help.
"""

import random
from typing import NamedTuple

from finetuning.generated.vocabulary import (
    WORDS,
    Split,
    capitalised,
    facts_in_split,
    money,
    read_texts,
)

# Possible extents of a matter, and whether each is too large for the help desk.
_EXTENTS = {
    "sums": {money(dollars): dollars > 2_000 for dollars in range(300, 5_000, 200)},
    "times": {
        f"{WORDS['numbers'][count]} {unit}": unit == "months" and count > 3
        for unit, counts in (("weeks", range(2, 9)), ("months", range(2, 11)))
        for count in counts
    },
}


class Matter(NamedTuple):
    """A matter; its questions and openings name both the {thing} and the {extent}."""

    things: list[str]
    extents: dict[str, bool]
    questions: list[str]
    openings: list[str]
    advice: list[str]


_TEXTS = read_texts("consultation")
MATTERS = {
    name: Matter(
        things=WORDS[fields["things"]] if isinstance(fields["things"], str) else fields["things"],
        extents=_EXTENTS[fields["extents"]],
        questions=fields["questions"],
        openings=fields["openings"],
        advice=fields["advice"],
    )
    for name, fields in _TEXTS["matters"].items()
}


def example(random_source: random.Random, split: Split) -> dict[str, str]:
    """Return one row; no combination of matter, thing and extent occurs in both splits."""
    choice = random_source.choice
    name = choice(tuple(MATTERS))
    matter = MATTERS[name]
    thing, extent = facts_in_split(
        random_source, split, "consultation " + name, matter.things, tuple(matter.extents)
    )
    words = {"thing": thing, "extent": extent, "town": choice(WORDS["towns"])}
    question = choice(_TEXTS["greetings"]) + choice(matter.questions) + choice(_TEXTS["pleas"])
    if random_source.random() < 0.5:
        question = capitalised(question)
    opening = capitalised(choice(matter.openings).format(**words))
    steps = random_source.sample(matter.advice, choice((1, 1, 2, 2, 3)))
    steps.append(choice(_TEXTS["large" if matter.extents[extent] else "small"]))
    return {
        "instruction": _TEXTS["instruction"],
        "input": question.format(**words),
        "output": choice(_TEXTS["comforts"])
        + " ".join([opening, *steps])
        + choice(_TEXTS["farewells"]),
    }
