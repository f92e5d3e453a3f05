"""Neutral prose for pre-training: places, people, offices, offences and short records.

The prose uses the people, towns, goods, offences and sums of the three styles, so that a model
learns these names and English word order. Records that are followed by questions teach the model
to look up an answer in the preceding text.
"""

from finetuning.generated.vocabulary import (
    OFFENCES,
    WORDS,
    RandomWords,
    capitalise,
    money,
    read_texts,
)

_TEXTS = read_texts("background")


def passage(draw: RandomWords) -> str:
    """Return one passage of about 60 to 200 words."""
    return draw.choice((_prose, _prose, _register))(draw)


def _prose(draw: RandomWords) -> str:
    """Return a passage of statements on two subjects."""
    words = _some_words(draw)
    subjects = draw.sample(list(_TEXTS["sentences"].values()), 2)
    first = draw.sample(subjects[0], draw.randint(6, 7))
    second = draw.sample(subjects[1], draw.randint(2, 4))
    return " ".join(_fill(frame, words, draw) for frame in (*first, *second))


def _register(draw: RandomWords) -> str:
    """Return three short records, each with questions that the record answers."""
    entries = []
    for _ in range(3):
        words = _some_words(draw)
        words["sum"] = money(draw.some_sum(200, 9_000))
        words["date"] = draw.date(draw.randint(1990, 2021))
        texts = draw.choice(_TEXTS["registers"])
        entries.append(draw.choice(texts["records"]).format(**words))
        for question, answer in draw.sample(texts["questions"], draw.randint(2, 3)):
            reply = capitalise(answer.format(**words))
            entries.append(f"Question: {question.format(**words)} Answer: {reply}.")
    return " ".join(entries)


def _some_words(draw: RandomWords) -> dict[str, str]:
    choice = draw.choice
    words = {}
    for key in ("town", "trade", "workplace"):
        words[key], words[f"other_{key}"] = draw.sample(WORDS[f"{key}s"], 2)
    offence, other_offence = draw.sample(OFFENCES, 2)
    for prefix in ("", "other_"):
        name = draw.full_name()
        words |= {f"{prefix}name": name, f"{prefix}surname": name.split()[1]}
    return words | {
        "offence": offence.name,
        "Offence": capitalise(offence.name),
        "gerund": offence.gerund,
        "past": offence.past,
        "article": str(offence.article),
        "other_offence": other_offence.name,
        "other_article": str(other_offence.article),
        "goods": draw.word("goods"),
        "household": draw.word("household"),
        "vehicle": draw.word("vehicles"),
        "friend": draw.word("friends"),
        "Weekday": draw.word("weekdays"),
        "number": choice(WORDS["numbers"][2:]),
        "birth_year": str(draw.randint(1940, 1975)),
        "distance": str(draw.randint(5, 90)),
        "thousands": str(draw.randint(2, 80)),
    }


def _fill(frame: str, words: dict[str, str], draw: RandomWords) -> str:
    """Fill in a sentence template with the words, and with newly drawn sums and dates."""
    year = draw.randint(1990, 2021)
    return frame.format(
        **words,
        year=year,
        price=money(draw.some_sum(200, 4_000)),
        sum=money(draw.some_sum(200, draw.choice((3_000, 9_000, 60_000)))),
        date=draw.date(year),
    )
