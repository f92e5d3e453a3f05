"""Court views: formal case facts and the court's view of them.

Modelled on figure 1(a) of the FedJudge paper: a long input in the style of an indictment, and an
output that begins with "This court holds that". The offence, the circumstances and the sum
determine the articles cited, the sentence and the fine, by the fixed rules in `_sentence`.
"""

from typing import Any

from finetuning.generated.vocabulary import OFFENCES, WORDS, RandomWords, Split, money, read_texts

_TEXTS: dict[str, Any] = read_texts("court")
ACTS: dict[str, list[str]] = _TEXTS["acts"]
_OFFENCES = {offence.name: offence for offence in OFFENCES}


def write_court_view(draw: RandomWords, split: Split) -> dict[str, str]:
    """Return one row; no combination of surname and offence occurs in both splits."""
    choice = draw.choice
    crime, surname = draw.facts_in_split(split, "court", tuple(_OFFENCES), WORDS["surnames"])
    offence = _OFFENCES[crime]
    dollars = draw.some_sum(500, choice((3_000, 10_000, 30_000, 60_000)))
    year = draw.randint(2010, 2020)
    names = [
        name
        for name in map(choice, _TEXTS["circumstance_rows"])
        if name and (name != "accessory" or offence.name in _TEXTS["joint_offences"])
    ][:3]
    draw.shuffle(names)
    circumstances = [_TEXTS["circumstances"][name] for name in names]
    steps = [circumstance["steps"] for circumstance in circumstances]
    term, fine = _sentence(dollars, steps, compensated="compensation" in names)
    articles = [offence.article, *sorted(each["article"] for each in circumstances)]
    words = {
        "name": f"{draw.word('first_names')} {surname}",
        **{person: draw.full_name() for person in ("victim", "witness", "leader", "counsel")},
        **{key: draw.word(f"{key}s") for key in ("town", "trade", "workplace")},
        "goods": draw.word("goods"),
        "sum": money(dollars),
        "date": draw.date(year),
        "later": draw.date(year + 1),
        "past_year": str(year - draw.randint(2, 8)),
        "offence": offence.name,
        "other_offence": choice(OFFENCES).name,
        "past": offence.past,
        "gerund": offence.gerund,
        "articles": _join([str(article) for article in articles]),
        "term": term,
        "fine": fine,
    }
    words["act"] = choice(ACTS[offence.name]).format(**words)
    words["value"] = choice(_TEXTS["values"]).format(**words)
    evidence = draw.sample(_TEXTS["evidence"], draw.randint(2, 4))
    words["evidence"] = _join([item.format(**words) for item in evidence])
    facts = [choice(each["told"]) for each in circumstances]
    remarks = draw.sample(_TEXTS["objections"], draw.randint(0, 1))
    proof = choice(_TEXTS["evidence_frames"])
    middle = choice(([*facts, proof], [proof, *facts]))
    input_parts = [choice(_TEXTS["charges"]), *middle, *remarks]
    output_parts = [choice(_TEXTS["holdings"]) + choice(_TEXTS["confirmations"])]
    weighed = _join([choice(each["weighed"]) for each in circumstances])
    effect = "neither" if sum(steps) == 0 else "milder" if sum(steps) < 0 else "harsher"
    output_parts.append(f"The defendant {weighed}, {choice(_TEXTS[effect])}.")
    output_parts.append(choice(_TEXTS["sentences"]))
    return {
        "instruction": _TEXTS["instruction"],
        "input": " ".join(input_parts).format(**words),
        "output": " ".join(output_parts).format(**words),
    }


def _sentence(dollars: int, steps: list[int], compensated: bool) -> tuple[str, str]:
    """Return the term of imprisonment and the fine, which depend only on the input.

    The value determines the initial term and the fine, and each circumstance changes the term. The
    term is suspended if the loss is compensated and there is no aggravating circumstance.
    """
    step = 1 + sum(dollars >= limit for limit in (3_000, 10_000, 30_000))
    kind = "a suspended term of" if compensated and max(steps) <= 0 else "imprisonment for"
    term = f"{kind} {_TEXTS['terms'][2 + step + sum(steps)]} months"
    return term, money((0, 500, 1_000, 3_000, 8_000)[step])


def _join(parts: list[str]) -> str:
    """Join the parts as a list in prose: "a", "a and b", "a, b and c"."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), parts[-1]])
