"""Consultations: a layperson's short question and a consultant's friendly answer.

Modelled on figure 1(b) of the FedJudge paper: an everyday problem in colloquial words, and plain
advice that repeats the subject and the sum or duration, and says where to get help.
"""

from typing import Any

from finetuning.generated.vocabulary import WORDS, RandomWords, Split, capitalise, money, read_texts

# Possible extents of a matter, and whether each is too large for the help desk.
_EXTENTS = {
    "sums": {money(dollars): dollars > 2_000 for dollars in range(300, 5_000, 200)},
    "times": {
        f"{WORDS['numbers'][count]} {unit}": unit == "months" and count > 3
        for unit, counts in (("weeks", range(2, 9)), ("months", range(2, 11)))
        for count in counts
    },
}
_TEXTS = read_texts("consultation")
PROBLEMS: dict[str, dict[str, Any]] = _TEXTS["matters"]
for _matter in PROBLEMS.values():
    _matter["extents"] = _EXTENTS[_matter["extents"]]
    if isinstance(_matter["things"], str):
        _matter["things"] = WORDS[_matter["things"]]


def write_consultation(draw: RandomWords, split: Split) -> dict[str, str]:
    """Return one row; no combination of matter, thing and extent occurs in both splits."""
    choice = draw.choice
    name = choice(tuple(PROBLEMS))
    matter = PROBLEMS[name]
    thing, extent = draw.facts_in_split(
        split, "consultation " + name, matter["things"], tuple(matter["extents"])
    )
    words = {"thing": thing, "extent": extent, "town": draw.word("towns")}
    question = choice(_TEXTS["greetings"]) + choice(matter["questions"]) + choice(_TEXTS["pleas"])
    if draw.random() < 0.5:
        question = capitalise(question)
    opening = capitalise(choice(matter["openings"]).format(**words))
    steps = draw.sample(matter["advice"], choice((1, 1, 2, 2, 3)))
    steps.append(choice(_TEXTS["large" if matter["extents"][extent] else "small"]))
    return {
        "instruction": _TEXTS["instruction"],
        "input": question.format(**words),
        "output": choice(_TEXTS["comforts"])
        + " ".join([opening, *steps])
        + choice(_TEXTS["farewells"]),
    }
