"""Legal reasoning: a small case with numbers, and the steps that lead to its answer.

Modelled on figure 1(c) of the FedJudge paper: numbered steps of a rigorous derivation. Each matter
has one rule of the Code of the Province, and the amounts, dates or ages in the input determine the
answer. The functions named after the matters draw these values for the sentences of reasoning.toml.
"""

from finetuning.generated.vocabulary import OFFENCES, WORDS, RandomWords, Split, read_texts

_TEXTS = read_texts("reasoning")


def write_reasoning(draw: RandomWords, split: Split) -> dict[str, str]:
    """Return one row; no combination of surname and matter occurs in both splits."""
    choice = draw.choice
    matter, surname = draw.facts_in_split(split, "reasoning", tuple(RULES), WORDS["surnames"])
    values: dict[str, object] = {"name": f"{draw.word('first_names')} {surname}"}
    values |= RULES[matter](draw)
    values["is"] = "is" if values.pop("holds", None) else "is not"
    case = _TEXTS["matters"][matter]
    words = {
        key: (choice(text) if key == "facts" else str(text)).format(**values)
        for key, text in case.items()
    }
    steps = zip(
        choice(_TEXTS["numberings"]), ("rule_steps", "found_steps", "compared_steps"), strict=True
    )
    numbered = [f"{number} {choice(_TEXTS[step]).format(**words)}" for number, step in steps]
    return {
        "instruction": _TEXTS["instruction"],
        "input": choice(_TEXTS["questions"]).format(**words),
        "output": " ".join([*numbered, f"Therefore, {words['answer']}."]),
    }


def theft(draw: RandomWords) -> dict[str, object]:
    """Ask whether a theft is serious, that is, whether the value is above a fixed sum."""
    goods, town = draw.word("durable_goods"), draw.word("towns")
    value = draw.some_sum(500, 6_000)
    return {"goods": goods, "town": town, "value": value, "holds": value > 3_000}


def limitation(draw: RandomWords) -> dict[str, object]:
    """Ask whether a claim is time-barred some years after it fell due."""
    lender, owed = draw.full_name(), draw.some_sum(500, 9_000)
    due, passed = draw.randint(2008, 2015), draw.randint(2, 7)
    years = {"due": due, "passed": passed, "sued": due + passed}
    return {"lender": lender, "owed": owed, **years, "holds": passed > 3}


def deposit(draw: RandomWords) -> dict[str, object]:
    """Ask how much of a deposit is due; it grows by a tenth if it is returned late."""
    town, days = draw.word("towns"), draw.randint(10, 60)
    paid = draw.some_sum(300, 3_000)
    owed = paid + paid // 10 if days > 30 else paid
    return {"town": town, "days": days, "paid": paid, "owed": owed, "holds": days > 30}


def notice(draw: RandomWords) -> dict[str, object]:
    """Ask for the pay due if the notice of dismissal was too short."""
    workplace = draw.word("workplaces")
    given, wage = draw.randrange(5, 30), draw.randrange(40, 140, 10)
    pay = {"wage": wage, "missing": 30 - given, "owed": (30 - given) * wage}
    return {"workplace": workplace, "given": given, **pay}


def warranty(draw: RandomWords) -> dict[str, object]:
    """Ask whether a defect appeared within the warranty period."""
    goods, town = draw.word("durable_goods"), draw.word("towns")
    months, price = draw.randint(3, 40), draw.some_sum(200, 4_000)
    return {"goods": goods, "town": town, "months": months, "price": price, "holds": months <= 24}


def interest(draw: RandomWords) -> dict[str, object]:
    """Ask for the interest on a loan; interest is valid only up to a maximum rate."""
    borrower, lent = draw.full_name(), draw.some_sum(1_000, 9_000)
    rate = draw.randint(6, 24)
    valid = {"valid": min(rate, 12), "owed": lent * min(rate, 12) // 100}
    return {"borrower": borrower, "lent": lent, "rate": rate, **valid, "holds": rate <= 12}


def drunk_driving(draw: RandomWords) -> dict[str, object]:
    """Ask whether a measured level of alcohol constitutes drunk driving."""
    town, trade = draw.word("towns"), draw.word("trades")
    level = draw.randint(40, 140)
    return {"town": town, "trade": trade, "level": level, "holds": level > 80}


def estate(draw: RandomWords) -> dict[str, object]:
    """Ask for the shares of a spouse and of each child in an estate."""
    town, share = draw.word("towns"), draw.some_sum(1_000, 9_000)
    heirs = draw.randint(3, 8)
    numbers = {"children": WORDS["numbers"][heirs - 1], "heirs": WORDS["numbers"][heirs]}
    return {"town": town, "share": share, "total": share * heirs, **numbers}


def shared_fault(draw: RandomWords) -> dict[str, object]:
    """Ask for the share of a loss that corresponds to a share of the fault."""
    other, fault = draw.full_name(), draw.randrange(10, 100, 10)
    loss = draw.some_sum(500, 9_000)
    return {"other": other, "fault": fault, "loss": loss, "owed": loss * fault // 100}


def repeat_offender(draw: RandomWords) -> dict[str, object]:
    """Ask whether the time since the last offence makes the defendant a repeat offender."""
    earlier, later = draw.sample([offence.name for offence in OFFENCES], 2)
    end, passed = draw.randint(2005, 2012), draw.randint(2, 9)
    years = {"end": end, "passed": passed, "again": end + passed}
    return {"earlier": earlier, "later": later, **years, "holds": passed <= 5}


def appeal(draw: RandomWords) -> dict[str, object]:
    """Ask whether an appeal was filed in time."""
    day, taken = draw.randint(1, 6), draw.randint(5, 22)
    month, offence = draw.word("months"), draw.choice(OFFENCES).name
    days = {"served": f"{day} {month}", "filed": f"{day + taken} {month}", "taken": taken}
    return {"offence": offence, **days, "holds": taken <= 15}


def majority(draw: RandomWords) -> dict[str, object]:
    """Ask whether a contract is valid without a parent's consent."""
    goods, town = draw.word("durable_goods"), draw.word("towns")
    age, price = draw.randint(14, 24), draw.some_sum(200, 4_000)
    valid = {"meets": "meets" if age >= 18 else "does not meet", "holds": age >= 18}
    return {"goods": goods, "town": town, "age": age, "price": price, **valid}


RULES = {
    matter.__name__: matter
    for matter in (
        *(theft, limitation, deposit, notice, warranty, interest, drunk_driving),
        *(estate, shared_fault, repeat_offender, appeal, majority),
    )
}
