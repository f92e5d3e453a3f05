"""Legal reasoning: a small case with numbers, and the steps that lead to its answer.

After figure 1(c) of the FedJudge paper: rigorous written description. Each matter has one rule
of the Code of the Province, and the amounts, dates or ages of the input decide the answer.
"""

import random
from typing import NamedTuple

from finetuning.generated import vocabulary
from finetuning.generated.vocabulary import DURABLE_GOODS, TOWNS, Split, full_name, money, some_sum

INSTRUCTION = "Please give the detailed reasoning process and then the answer."


class Case(NamedTuple):
    """A case, told in two ways by `facts`; only the question has its full stop already."""

    article: int
    rule: str
    facts: tuple[str, str]
    question: str
    found: str
    compared: str
    answer: str


def is_or_not(holds: bool) -> str:
    """Give "is" or "is not"."""
    return "is" if holds else "is not"


def theft(random_source: random.Random, name: str) -> Case:
    """Ask whether a theft is serious, which it is above a fixed sum."""
    goods, town = random_source.choice(DURABLE_GOODS), random_source.choice(TOWNS)
    value = some_sum(random_source, 500, 6_000)
    return Case(
        118,
        "a theft is serious if the value is above $3,000",
        (
            f"In {town}, {name} stole {goods} worth {money(value)}",
            f"{name} took {goods} from a yard in {town}; the value was {money(value)}",
        ),
        "Is the theft serious?",
        f"the goods that {name} took in {town} were worth {money(value)}",
        f"{money(value)} {is_or_not(value > 3_000)} above the limit of $3,000",
        f"the theft by {name} {is_or_not(value > 3_000)} serious",
    )


def limitation(random_source: random.Random, name: str) -> Case:
    """Ask whether a claim is barred, some years after it fell due."""
    lender, owed = full_name(random_source), money(some_sum(random_source, 500, 9_000))
    due, passed = random_source.randint(2008, 2015), random_source.randint(2, 7)
    return Case(
        311,
        "a claim for debt is barred after 3 years",
        (
            f"{name} had to repay {lender} {owed} in {due}, but {lender} sued in {due + passed}",
            f"{lender} sued in {due + passed} for {owed} that {name} had owed since {due}",
        ),
        "Is the claim barred?",
        f"the debt of {name} fell due in {due} and the action came in {due + passed}",
        f"{passed} years {is_or_not(passed > 3)} longer than 3 years",
        f"the claim of {lender} against {name} {is_or_not(passed > 3)} barred",
    )


def deposit(random_source: random.Random, name: str) -> Case:
    """Ask for a deposit, which grows by a tenth if it is returned late."""
    town, days = random_source.choice(TOWNS), random_source.randint(10, 60)
    paid = some_sum(random_source, 300, 3_000)
    owed = money(paid + paid // 10 if days > 30 else paid)
    return Case(
        324,
        "a deposit returned after more than 30 days grows by a tenth",
        (
            f"{name} left a flat in {town} and waited {days} days for the deposit of {money(paid)}",
            f"A landlord in {town} kept the deposit of {name}, {money(paid)}, for {days} days",
        ),
        "How much is owed?",
        f"the deposit of {name} was {money(paid)} and the delay was {days} days",
        f"{days} days {is_or_not(days > 30)} more than 30 days, and {owed} is due",
        f"the landlord owes {name} {owed}",
    )


def notice(random_source: random.Random, name: str) -> Case:
    """Ask for the pay due for days that were missing from a notice of dismissal."""
    workplace = random_source.choice(vocabulary.WORKPLACES)
    given, wage = random_source.randrange(5, 30), random_source.randrange(40, 140, 10)
    missing, owed = 30 - given, money((30 - given) * wage)
    return Case(
        337,
        "a dismissal needs 30 days of notice, and missing days are paid",
        (
            f"A {workplace} dismissed {name}, whose daily wage was ${wage}, {given} days ahead",
            f"{name} earned ${wage} a day at a {workplace} and was given {given} days of notice",
        ),
        "How much must be paid for missing notice?",
        f"{name} had {given} of 30 days, so that {missing} were missing",
        f"{missing} times ${wage} is {owed}",
        f"the {workplace} must pay {name} {owed}",
    )


def warranty(random_source: random.Random, name: str) -> Case:
    """Ask whether a defect showed within the warranty."""
    goods, town = random_source.choice(DURABLE_GOODS), random_source.choice(TOWNS)
    months, price = random_source.randint(3, 40), money(some_sum(random_source, 200, 4_000))
    return Case(
        342,
        "a seller is liable for defects that appear within 24 months",
        (
            f"{name} bought {goods} in {town} for {price}; after {months} months a defect appeared",
            f"For {price} a shop in {town} sold {name} {goods}, which failed in {months} months",
        ),
        "Is the seller liable?",
        f"the defect appeared {months} months after {name} bought {goods}",
        f"{months} months {is_or_not(months <= 24)} within 24 months",
        f"the seller in {town} {is_or_not(months <= 24)} liable to {name}",
    )


def interest(random_source: random.Random, name: str) -> Case:
    """Ask for the interest on a loan, which is valid up to a cap."""
    borrower, lent = full_name(random_source), some_sum(random_source, 1_000, 9_000)
    rate = random_source.randint(6, 24)
    valid, owed = min(rate, 12), money(lent * min(rate, 12) // 100)
    return Case(
        358,
        "yearly interest is valid up to 12 percent",
        (
            f"{name} lent {borrower} {money(lent)} for a year at {rate} percent",
            f"{borrower} owes {name} {money(lent)} with yearly interest of {rate} percent",
        ),
        f"How much interest may {name} claim for a year?",
        f"{name} charges {rate} percent, which {is_or_not(rate <= 12)} within the cap",
        f"{valid} percent of {money(lent)} is {owed}",
        f"{name} may claim interest of {owed} from {borrower}",
    )


def drunk_driving(random_source: random.Random, name: str) -> Case:
    """Ask whether a measured level of alcohol makes drunk driving."""
    town, trade = random_source.choice(TOWNS), random_source.choice(vocabulary.TRADES)
    level = random_source.randint(40, 140)
    return Case(
        203,
        "driving with more than 80 milligrams of alcohol is drunk driving",
        (
            f"{name}, a {trade}, drove through {town} and was tested at {level} milligrams",
            f"Police in {town} stopped {name}, a {trade}, and measured {level} milligrams",
        ),
        f"Is {name} guilty of drunk driving?",
        f"the test of {name} in {town} showed {level} milligrams",
        f"{level} milligrams {is_or_not(level > 80)} above the limit of 80 milligrams",
        f"{name} {is_or_not(level > 80)} guilty of drunk driving",
    )


def estate(random_source: random.Random, name: str) -> Case:
    """Ask for the share of a spouse and of each child in an estate."""
    town, share = random_source.choice(TOWNS), some_sum(random_source, 1_000, 9_000)
    heirs = random_source.randint(3, 8)
    total, children = money(share * heirs), vocabulary.NUMBERS[heirs - 1]
    return Case(
        366,
        "a spouse and the children inherit in equal shares",
        (
            f"{name} died in {town}, leaving {total}, a spouse and {children} children",
            f"The estate of {name} in {town} is {total}; a spouse and {children} children survive",
        ),
        "What does each heir receive?",
        f"a spouse and {children} children make {vocabulary.NUMBERS[heirs]} heirs of {name}",
        f"{total} divided by {vocabulary.NUMBERS[heirs]} is {money(share)}",
        f"each heir of {name} receives {money(share)}",
    )


def shared_fault(random_source: random.Random, name: str) -> Case:
    """Ask for the part of a loss that answers to a part of the fault."""
    other, fault = full_name(random_source), random_source.randrange(10, 100, 10)
    loss = some_sum(random_source, 500, 9_000)
    owed = money(loss * fault // 100)
    return Case(
        379,
        "a party bears the loss in proportion to its fault",
        (
            f"{name} was {fault} percent at fault when {other} lost {money(loss)} in an accident",
            f"{other} lost {money(loss)} in a collision, of which {name} bears {fault} percent",
        ),
        f"How much must {name} pay?",
        f"{name} bears {fault} percent of the fault for a loss of {money(loss)}",
        f"{fault} percent of {money(loss)} is {owed}",
        f"{name} must pay {other} {owed}",
    )


def repeat_offender(random_source: random.Random, name: str) -> Case:
    """Ask whether a new offence came soon enough to make a repeat offender."""
    earlier, later = random_source.sample(vocabulary.OFFENCE_NAMES, 2)
    end, passed = random_source.randint(2005, 2012), random_source.randint(2, 9)
    return Case(
        47,
        "whoever offends within 5 years of an earlier sentence is a repeat offender",
        (
            f"{name}, in prison for {earlier} until {end}, turned to {later} in {end + passed}",
            f"{name} turned to {later} in {end + passed}; a term for {earlier} had ended in {end}",
        ),
        f"Is {name} a repeat offender?",
        f"{name} offended again in {end + passed}, {passed} years after {end}",
        f"{passed} years {is_or_not(passed <= 5)} within the period of 5 years",
        f"{name} {is_or_not(passed <= 5)} a repeat offender",
    )


def appeal(random_source: random.Random, name: str) -> Case:
    """Ask whether an appeal was filed within the days allowed."""
    day, taken = random_source.randint(1, 6), random_source.randint(5, 22)
    month = random_source.choice(vocabulary.MONTHS)
    offence = random_source.choice(vocabulary.OFFENCE_NAMES)
    served, filed = f"{day} {month}", f"{day + taken} {month}"
    return Case(
        402,
        "an appeal is timely within 15 days of service",
        (
            f"{name}, convicted of {offence} and served on {served}, appealed on {filed}",
            f"A judgment for {offence} reached {name} on {served}; the appeal came on {filed}",
        ),
        "Is the appeal timely?",
        f"{name} was served on {served} and appealed {taken} days later",
        f"{taken} days {is_or_not(taken <= 15)} within the period of 15 days",
        f"the appeal of {name} {is_or_not(taken <= 15)} timely",
    )


def majority(random_source: random.Random, name: str) -> Case:
    """Ask whether a contract is valid without a parent's consent."""
    goods, town = random_source.choice(DURABLE_GOODS), random_source.choice(TOWNS)
    age, price = random_source.randint(14, 24), money(some_sum(random_source, 200, 4_000))
    return Case(
        305,
        "a contract without a parent's consent is valid from the age of 18",
        (
            f"{name}, aged {age}, bought {goods} in {town} for {price} and asked no parent",
            f"Without consent of a parent, {name} of {town}, aged {age}, paid {price} for {goods}",
        ),
        "Is the contract valid?",
        f"{name} was {age} when buying {goods} and no parent consented",
        f"an age of {age} {'meets' if age >= 18 else 'does not meet'} the limit of 18",
        f"the contract of {name} for {price} {is_or_not(age >= 18)} valid",
    )


MATTERS = {
    matter.__name__: matter
    for matter in (
        *(theft, limitation, deposit, notice, warranty, interest, drunk_driving),
        *(estate, shared_fault, repeat_offender, appeal, majority),
    )
}
# The same parts in different orders; the rule is not always told.
QUESTIONS = (
    "{facts}. {question}",
    "{facts}. By law, {rule}. {question}",
    "Article {article} provides that {rule}. {facts}. {question}",
    "Suppose that {rule}. {facts}. {question}",
)
RULE_STEPS = (
    "The Code provides in Article {article} that {rule}.",
    "The rule of Article {article} is that {rule}.",
    "Under Article {article}, {rule}.",
)
FOUND_STEPS = ("In this case, {found}.", "Here, {found}.", "In fact, {found}.")
COMPARED_STEPS = ("Consequently, {compared}.", "It follows that {compared}.", "So {compared}.")
NUMBERINGS = (("1.", "2.", "3."), ("First:", "Second:", "Third:"), ("(1)", "(2)", "(3)"))


def example(random_source: random.Random, split: Split) -> dict[str, str]:
    """Give one row; nobody's surname meets the same matter in both splits."""
    choice = random_source.choice
    matter, surname = vocabulary.facts_in_split(
        random_source, split, "reasoning", tuple(MATTERS), vocabulary.SURNAMES
    )
    name = f"{choice(vocabulary.FIRST_NAMES)} {surname}"
    case = MATTERS[matter](random_source, name)
    words = {**case._asdict(), "facts": choice(case.facts)}
    frames = (RULE_STEPS, FOUND_STEPS, COMPARED_STEPS)
    numbered = [
        f"{number} {choice(step).format(**words)}"
        for number, step in zip(choice(NUMBERINGS), frames, strict=True)
    ]
    return {
        "instruction": INSTRUCTION,
        "input": choice(QUESTIONS).format(**words),
        "output": " ".join([*numbered, f"Therefore, {case.answer}."]),
    }
