"""Neutral prose to pre-train on: places, people, offices, offences and short records.

It uses the people, towns, goods, offences and sums of the three styles, so that a model learns
their names and an English word order, and records followed by questions teach it to look up an
answer in what it has just read. It avoids the styles' own phrases: no holding of a court, no
advice and no numbered steps.
"""

import random
from collections.abc import Callable

from finetuning.generated import vocabulary
from finetuning.generated.vocabulary import capitalised, money, some_sum

TOWN_SENTENCES = (
    "{town} is a town of the province, {distance} kilometres from {other_town}.",
    "{town} lies on a river and has about {thousands},000 inhabitants.",
    "The market of {town} is held every week in front of the town office.",
    "Many people in {town} work at the {workplace}, others travel to {other_town} by bus.",
    "The first {workplace} in {town} opened in {year}.",
    "A {workplace} and a {other_workplace} stand near the public forest and the lake.",
    "The court, the police station and the tax office of {town} share one building.",
    "A bridge has connected {town} with {other_town} since {year}.",
    "The bank of {town} keeps the savings of most families of the town.",
    "Houses in {town} cost less than in {other_town}, and rent has changed little since {year}.",
    "In {year} the town office repaired the road, the bridge and the garden wall of the school.",
)
PERSON_SENTENCES = (
    "{name} was born in {town} in {birth_year} and became a {trade}.",
    "{surname} works as a {trade} at a {workplace} in {town}.",
    "The family owns a house with a small garden near the river.",
    "As a {trade}, {surname} earned {price} in the first month and saved most of it.",
    "In {year} {surname} moved from {town} to {other_town}.",
    "{name} and {other_name} have known each other since {year}.",
    "The father was a {other_trade}, and the mother worked in a {other_workplace}.",
    "A brother of {surname} is a {other_trade} in {other_town} and has three children.",
    "{name} bought {goods} from {other_name} on {date} and paid {price}.",
    "On some evenings {surname} and {other_surname} meet in a restaurant and talk about work.",
    "After ten years {surname} opened a {workplace} and later sold it for {sum}.",
)
OFFENCE_SENTENCES = (
    "{Offence} means {gerund}.",
    "The word crime covers every offence in the Code, among them {other_offence}.",
    "After an arrest the police tell the family, and a lawyer comes before the first hearing.",
    "The Code of the Province deals with {offence} in Article {article}.",
    "Article {article} is about {offence}.",
    "In {year} the courts of the province counted {number} cases of {offence}.",
    "Most cases of {offence} in {town} concern sums of less than {sum}.",
    "Whoever {past} may be sent to prison or may have to pay a fine.",
    "The police of {town} gave a public talk about {offence} on {date}.",
    "{Offence} is found more often in {town} than in {other_town}.",
    "A newspaper in {other_town} described how someone {past} and was found a month later.",
    "A different article of the Code, Article {other_article}, is about {other_offence}.",
    "A prison sentence for {offence} has often lasted some months, rarely more than three years.",
)
NEWS_SENTENCES = (
    "{Weekday}'s newspaper in {town} reports on the court, the market and the weather.",
    "The trial of {name}, a {trade}, began in {town} on {date}.",
    "The prosecutor spoke about {offence}, and the defendant {name} listened.",
    "The witness {other_name} described what happened at the {workplace}.",
    "Lawyers of both sides showed photographs, a contract and bank records.",
    "The judge will read the judgment next month.",
    "The fine in a similar trial was {sum}.",
    "A {workplace} in {other_town} lost {goods} on {date}, and the police found them later.",
    "A van and a lorry met on the narrow bridge, and the repair will cost {price}.",
    "The price of {goods} was {price} at the market of {other_town}.",
    "{other_surname} paid back a loan of {sum} to the bank on {date}.",
    "The police asked {surname} about an accident near the {other_workplace}.",
    "The defendant admitted the act, returned the money and went home to {other_town}.",
)
CONTRACT_SENTENCES = (
    "A contract is a promise between two sides that the law protects.",
    "The contract between {name} and {other_name} was signed in {town} on {date}.",
    "{name} sold {goods} to {other_name} for {price}.",
    "The buyer paid a deposit, and the rest of the {price} was due after {number} months.",
    "A landlord rents out a flat or a house, and the tenant pays rent every month.",
    "The tenant {name} pays a monthly rent of {price} for a flat in {town}.",
    "The owner of the {workplace} pays each {trade} a daily wage and gives 20 days of holiday.",
    "When a worker is dismissed, the employer writes a letter and pays the last wages.",
    "Interest is the price of a loan and is counted in percent of the sum for each year.",
    "A will says who receives the house, the savings and the goods of a person after death.",
    "Spouses who divorce share the furniture, the car and the money they saved.",
    "A seller gives a warranty of {number} months for {goods}.",
    "A debt is what one party owes the other, and a claim is the right to ask for it.",
    "The limit for goods without insurance is {price}, and any loss above it must be reported.",
    "Insurance pays for the repair of a car, a bike or a roof.",
    "The neighbour of {name} keeps a dog and plays the piano in the evening.",
    "A receipt shows what was bought, when it was bought and how much was paid.",
)
EVERYDAY_SENTENCES = (
    "A guide to {town} says that you can see the lake from your room if it is not dark.",
    "If you want to work in a {workplace}, there may be a job at the job office.",
    "Your bank will send you a letter or a text when money comes in or goes out.",
    "You may take your {household} to a shop in {town} that will fix it for {price}.",
    "The {vehicle} is free for {number} days, and then it will cost you {price} for a week.",
    "My {friend} has a {vehicle} that is good for small roads, and I have a {household}.",
    "They got a new {household} for {price} and gave the old one to their {friend}.",
    "It took me {number} weeks to write the book, and it is now with the printer.",
    "There is a help desk in the town hall, and a lawyer sits there for {number} hours a week.",
    "The boss was late, so they had to wait with the {vehicle} until it was time to go.",
    "I still have the photos, the video and the note that you sent me {number} months ago.",
    "We had a talk about the lease, and she will check whether everything in it is right.",
    "When the {household} is broken, get the receipt and look at what it says on the back.",
    "A plumber, a roofer, a builder and a tiler had their vans in front of the house.",
    "My aunt plays the piano, my uncle plays the drums, and the dog does not like it at all.",
    "He paid up front, but {number} weeks later he had not seen the {household}.",
    "Anyone who gets a ticket in the bus lane can pay it or let the court look at it.",
    "What do you do after work? I call my {friend}, or I go for a walk with the dog.",
    "How much does it cost? It is {price}, and the insurance is more than half of that.",
    "Where is the job office? It is next to the gym, just over the bridge.",
    "Who can help with a form? The desk at the town office can, and it is free.",
    "Is it far to {other_town}? No, it takes the {vehicle} less than an hour.",
)
RECORDS = (
    "{name}, a {trade} from {town}, bought {goods} from {other_name} for {sum} on {date}.",
    "On {date} {other_name} sold {goods} to {name}, a {trade} in {town}, at a price of {sum}.",
    "The records of {town} show that {name}, a {trade}, paid {other_name} {sum} for {goods} on "
    "{date}.",
)
RECORD_QUESTIONS = (
    ("Who paid?", "{name}"),
    ("Who was the buyer?", "{name}"),
    ("Who was the seller?", "{other_name}"),
    ("Who received the money?", "{other_name}"),
    ("What was the price?", "{sum}"),
    ("How much was paid?", "{sum}"),
    ("What was sold?", "{goods}"),
    ("When was it paid?", "{date}"),
    ("What is the trade of {name}?", "{trade}"),
    ("Which town is named?", "{town}"),
)
CASE_RECORDS = (
    "{name} of {town} stood trial for {offence} on {date}; the sum in question was {sum}.",
    "A trial for {offence} took place in {town} on {date}. The defendant was {name}, and the sum "
    "in question was {sum}.",
    "The court register of {town} has this entry: {name}, {offence}, {sum}, {date}.",
)
CASE_QUESTIONS = (
    ("Who was the defendant?", "{name}"),
    ("What was the trial about?", "{offence}"),
    ("Which offence is named?", "{offence}"),
    ("Which article of the Code deals with {offence}?", "Article {article}"),
    ("What was the sum?", "{sum}"),
    ("Where was the trial?", "{town}"),
    ("On which date was the trial?", "{date}"),
)
WEEKDAYS = vocabulary.listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday")


def some_words(random_source: random.Random) -> dict[str, str]:
    """Draw what the frames of one passage speak of."""
    choice = random_source.choice
    town, other_town = random_source.sample(vocabulary.TOWNS, 2)
    trade, other_trade = random_source.sample(vocabulary.TRADES, 2)
    workplace, other_workplace = random_source.sample(vocabulary.WORKPLACES, 2)
    offence, other_offence = random_source.sample(vocabulary.OFFENCES, 2)
    name, other_name = (vocabulary.full_name(random_source) for _ in range(2))
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
        "goods": choice(vocabulary.GOODS),
        "household": choice(vocabulary.HOUSEHOLD),
        "vehicle": choice(vocabulary.VEHICLES),
        "friend": choice(vocabulary.FRIENDS),
        "Weekday": choice(WEEKDAYS),
        "number": choice(vocabulary.NUMBERS[2:]),
        "birth_year": str(random_source.randint(1940, 1975)),
        "distance": str(random_source.randint(5, 90)),
        "thousands": str(random_source.randint(2, 80)),
    }


def filled(frame: str, words: dict[str, str], random_source: random.Random) -> str:
    """Fill a frame, with sums and dates of its own, which differ within a passage."""
    year = random_source.randint(1990, 2021)
    return frame.format(
        **words,
        year=year,
        price=money(some_sum(random_source, 200, 4_000)),
        sum=money(some_sum(random_source, 200, random_source.choice((3_000, 9_000, 60_000)))),
        date=vocabulary.date(random_source, year),
    )


def prose(random_source: random.Random) -> str:
    """Give a passage of one or two subjects in plain statements."""
    words = some_words(random_source)
    subjects = random_source.sample(
        (
            *(TOWN_SENTENCES, PERSON_SENTENCES, OFFENCE_SENTENCES),
            *(NEWS_SENTENCES, CONTRACT_SENTENCES, EVERYDAY_SENTENCES),
        ),
        2,
    )
    first = random_source.sample(subjects[0], random_source.randint(6, 7))
    second = random_source.sample(subjects[1], random_source.randint(2, 4))
    return " ".join(filled(frame, words, random_source) for frame in (*first, *second))


def register(random_source: random.Random) -> str:
    """Give three short records, each with questions that it answers."""
    entries = []
    for _ in range(3):
        words = some_words(random_source)
        words["sum"] = money(some_sum(random_source, 200, 9_000))
        words["date"] = vocabulary.date(random_source, random_source.randint(1990, 2021))
        records, questions = random_source.choice(
            ((RECORDS, RECORD_QUESTIONS), (CASE_RECORDS, CASE_QUESTIONS))
        )
        lines = [random_source.choice(records).format(**words)]
        for question, answer in random_source.sample(questions, random_source.randint(2, 3)):
            reply = capitalised(answer.format(**words))
            lines.append(f"Question: {question.format(**words)} Answer: {reply}.")
        entries.append(" ".join(lines))
    return " ".join(entries)


PASSAGES: tuple[Callable[[random.Random], str], ...] = (prose, prose, register)


def passage(random_source: random.Random) -> str:
    """Give one passage of some 60 to 200 words."""
    return random_source.choice(PASSAGES)(random_source)
