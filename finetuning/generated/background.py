"""Neutral prose for pre-training: places, people, offices, offences and short records.

It uses the people, towns, goods, offences and sums of the three styles, so that a model learns
their names and English word order. Records followed by questions teach it to look up an answer
in what it has just read.
"""

import random

from finetuning.generated.vocabulary import (
    OFFENCES,
    WORDS,
    capitalised,
    date,
    full_name,
    money,
    read_texts,
    some_sum,
)

_TEXTS = read_texts("background")


def passage(random_source: random.Random) -> str:
    """Return one passage of about 60 to 200 words."""
    return random_source.choice((_prose, _prose, _register))(random_source)


def _prose(random_source: random.Random) -> str:
    """Return a passage of statements on two subjects."""
    words = _some_words(random_source)
    subjects = random_source.sample(list(_TEXTS["sentences"].values()), 2)
    first = random_source.sample(subjects[0], random_source.randint(6, 7))
    second = random_source.sample(subjects[1], random_source.randint(2, 4))
    return " ".join(_filled(frame, words, random_source) for frame in (*first, *second))


def _register(random_source: random.Random) -> str:
    """Return three short records, each with questions that it answers."""
    entries = []
    for _ in range(3):
        words = _some_words(random_source)
        words["sum"] = money(some_sum(random_source, 200, 9_000))
        words["date"] = date(random_source, random_source.randint(1990, 2021))
        texts = random_source.choice(_TEXTS["registers"])
        entries.append(random_source.choice(texts["records"]).format(**words))
        for question, answer in random_source.sample(
            texts["questions"], random_source.randint(2, 3)
        ):
            reply = capitalised(answer.format(**words))
            entries.append(f"Question: {question.format(**words)} Answer: {reply}.")
    return " ".join(entries)


def _some_words(random_source: random.Random) -> dict[str, str]:
    """Draw the words of one passage."""
    choice = random_source.choice
    town, other_town = random_source.sample(WORDS["towns"], 2)
    trade, other_trade = random_source.sample(WORDS["trades"], 2)
    workplace, other_workplace = random_source.sample(WORDS["workplaces"], 2)
    offence, other_offence = random_source.sample(OFFENCES, 2)
    name, other_name = (full_name(random_source) for _ in range(2))
    return {
        "name": name,
        "other_name": other_name,
        "surname": name.split()[1],
        "other_surname": other_name.split()[1],
        "town": town,
        "other_town": other_town,
        "trade": trade,
        "other_trade": other_trade,
        "workplace": workplace,
        "other_workplace": other_workplace,
        "offence": offence.name,
        "Offence": capitalised(offence.name),
        "gerund": offence.gerund,
        "past": offence.past,
        "article": str(offence.article),
        "other_offence": other_offence.name,
        "other_article": str(other_offence.article),
        "goods": choice(WORDS["goods"]),
        "household": choice(WORDS["household"]),
        "vehicle": choice(WORDS["vehicles"]),
        "friend": choice(WORDS["friends"]),
        "Weekday": choice(WORDS["weekdays"]),
        "number": choice(WORDS["numbers"][2:]),
        "birth_year": str(random_source.randint(1940, 1975)),
        "distance": str(random_source.randint(5, 90)),
        "thousands": str(random_source.randint(2, 80)),
    }


def _filled(frame: str, words: dict[str, str], random_source: random.Random) -> str:
    """Fill in a frame; sums and dates are drawn anew each time."""
    year = random_source.randint(1990, 2021)
    return frame.format(
        **words,
        year=year,
        price=money(some_sum(random_source, 200, 4_000)),
        sum=money(some_sum(random_source, 200, random_source.choice((3_000, 9_000, 60_000)))),
        date=date(random_source, year),
    )
