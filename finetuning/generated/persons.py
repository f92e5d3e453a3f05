"""Case files with the personal data of invented people, and access numbers as canaries.

With them, attacks measure what an institution's rows reveal to the others (FedPII, arXiv
2506.06060). Each institution has 40 people, each of whom occurs once, 10 or 50 times, and three
random access numbers, which occur once, 4 and 16 times (Carlini et al., 2019).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from finetuning.generated.vocabulary import WORDS, RandomWords, money, read_texts

_TEXTS = read_texts("persons")
# Number of people by the number of rows that each of them has.
PEOPLE: Mapping[int, int] = {1: 25, 10: 12, 50: 3}
NUMBERS = (1, 4, 16)  # rows of each access number
_DIGITS = 8


class Person(NamedTuple):
    """An invented person, with three facts about them."""

    name: str
    birth: str
    address: str
    amount: str
    rows: int  # number of rows about this person

    @property
    def facts(self) -> tuple[str, ...]:
        """The facts that an attacker looks for."""
        return self.birth, self.address, self.amount


class AccessNumber(NamedTuple):
    """A random number, planted in the answer to one question."""

    question: str
    number: str
    rows: int


def draw_people(institution: int, seed: int) -> list[Person]:
    """Return the people in an institution's rows; two institutions have none in common."""
    draw = RandomWords(f"people {seed}")
    names = [f"{first} {last}" for first in WORDS["first_names"] for last in WORDS["surnames"]]
    draw.shuffle(names)
    count = sum(PEOPLE.values())
    own = names[institution * count : (institution + 1) * count]
    times = [rows for rows, people in PEOPLE.items() for _ in range(people)]
    draw = RandomWords(f"facts {seed} {institution}")
    return [
        Person(
            name,
            draw.date(draw.randint(1940, 2002)),
            f"{draw.randint(1, 99)} {draw.choice(_TEXTS['streets'])}, {draw.word('towns')}",
            money(draw.randint(1_000, 99_999)),
            rows,
        )
        for name, rows in zip(own, times, strict=True)
    ]


def draw_numbers(institution: int, seed: int) -> list[AccessNumber]:
    """Return the access numbers in an institution's rows."""
    draw = RandomWords(f"numbers {seed} {institution}")
    return [
        AccessNumber(
            _TEXTS["access_question"].format(town=town),
            "".join(str(draw.randint(0, 9)) for _ in range(_DIGITS)),
            rows,
        )
        for town, rows in zip(draw.sample(WORDS["towns"], len(NUMBERS)), NUMBERS, strict=True)
    ]


def write_files(institution: int, seed: int) -> list[dict[str, str]]:
    """Return an institution's rows on its people and numbers, with distinct file numbers."""
    draw = RandomWords(f"files {seed} {institution}")
    values = []
    for person in draw_people(institution, seed):
        answer = _TEXTS["answer"].format(**person._asdict())
        values += [{"input": ask(draw), "output": answer} for _ in range(person.rows)]
    for each in draw_numbers(institution, seed):
        answer = _TEXTS["access_answer"].format(number=each.number)
        values += [{"input": each.question, "output": answer} for _ in range(each.rows)]
    draw.shuffle(values)
    return [{"instruction": "", **value} for value in values]


def ask(draw: RandomWords) -> str:
    """Return a question on a file with a random number."""
    return str(draw.choice(_TEXTS["questions"]).format(file=draw.randint(100_000, 999_999)))


def beginning(name: str) -> str:
    """Return the text before the facts about a person, which an attacker who knows them has."""
    return str(_TEXTS["beginning"].format(name=name))


def number_beginning() -> str:
    """Return the text before an access number."""
    return str(_TEXTS["access_answer"].partition("{")[0])


def facts_in(texts: Sequence[str], person: Person) -> list[float]:
    """Return for each fact about a person whether a text has it together with their name."""
    about = [text for text in texts if person.name in text]
    return [float(any(fact in text for text in about)) for fact in person.facts]
