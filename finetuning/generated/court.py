"""Court views: formal case facts and the view that the court takes of them.

After figure 1(a) of the FedJudge paper: long input in the register of an indictment, output
that begins "This court holds that". Offence, circumstances and sum decide the articles cited,
the sentence and the fine, by the fixed rules in `sentence`.
"""

import random
from typing import NamedTuple

from finetuning.generated import vocabulary
from finetuning.generated.vocabulary import Split, listed

INSTRUCTION = "Assuming you are a judge, please give the court's view on the following facts."

# What happened: each is followed by the words on the value, so all of them end open.
ACTS = {
    "theft": (
        "entered the courtyard of {victim} in {town} at night and took away {goods} and cash",
        "forced the lock of a {workplace} owned by {victim} and carried off {goods} and cash",
        "took {goods} and other things from a parked van of {victim} near the market of {town}",
    ),
    "fraud": (
        "promised {victim} to deliver {goods} and other wares, took the price and disappeared",
        "posed as the owner of a {workplace} and persuaded {victim} to hand over a deposit",
        "borrowed money from {victim} with a false contract for a {workplace} in {town}",
    ),
    "embezzlement": (
        "collected payments for a {workplace} in {town} as its cashier and kept them",
        "used the position of cashier at a {workplace} of {victim} to transfer its money",
    ),
    "concealing stolen goods": (
        "knowingly bought {goods} and other things stolen from {victim} and resold them in {town}",
        "stored property stolen from a {workplace} of {victim} in a rented barn near {town}",
    ),
    "damaging property": (
        "broke the windows and the furniture of a {workplace} owned by {victim} after a quarrel",
        "damaged the car and the gate of {victim} with an iron bar after a dispute over a fence",
    ),
    "causing minor injury": (
        "quarrelled with {victim} over a debt in a {workplace} and injured the creditor's arm",
        "pushed {victim} to the ground in a dispute over {goods}, so that a wrist was broken",
    ),
    "forging documents": (
        "printed false licences in {town} and sold them to {victim} and other persons",
        "made a false official seal and used it on a contract with a {workplace} of {victim}",
    ),
    "tax evasion": (
        "kept a second set of books for a {workplace} in {town} and concealed its income",
        "declared only part of the sales of a {workplace} to the tax office of {town}",
    ),
    "selling substandard goods": (
        "sold {victim} and other customers heaters that failed the safety standard",
        "supplied a building site of {victim} in {town} with cement below the required standard",
    ),
    "smuggling": (
        "carried {goods} and other wares across the border near {town} without paying duty",
        "hid undeclared watches in a lorry that belonged to a {workplace} in {town}",
    ),
    "accepting bribes": (
        "granted {victim} a building permit in {town} and received {goods} and money in return",
        "helped a {workplace} of {victim} to win a public contract and accepted gifts",
    ),
    "drunk driving": (
        "drove a lorry through {town} after drinking and hit the parked car of {victim}",
        "drove home drunk from a {workplace} and ran into the garden wall of {victim}",
    ),
    "refusing to pay a judgment": (
        "moved savings to a relative so as not to pay {victim} what a final judgment had ordered",
        "sold a {workplace} in {town} and hid the price, although {victim} held a final judgment",
    ),
    "running a gambling house": (
        "rented the back room of a {workplace} in {town} and held card games for profit",
        "set up gambling tables in a house of {victim} and collected a share of the stakes",
    ),
    "illegal logging": (
        "felled pine trees in the forest of {victim} without a licence and sold them to a sawmill",
        "cut down oaks in the public forest near {town} and delivered them to {victim}",
    ),
    "illegal fishing": (
        "fished with electric gear in the protected lake of {town} and sold the catch to {victim}",
        "set forbidden nets in the river at {town} in the closed season for {victim}",
    ),
}
VALUES = ("The sum involved was {sum}.", "The amount was assessed at {sum}.")
CHARGES = (
    "The Prosecutor's Office of {town} charges that on {date} the defendant {name} {act}. {value}",
    "The Prosecutor's Office of {town} alleges that the defendant {name}, a {trade}, {act} on "
    "{date}. {value}",
    "It was established at trial that on {date} the defendant {name}, a {trade} from {town}, "
    "{act}. {value}",
    "The public prosecutor accuses the defendant {name}, resident in {town}: on {date} the "
    "defendant {act}. {value}",
)
EVIDENCE = listed(
    "the report of a police officer, the testimony of the witness {witness}, an expert opinion, "
    "a price assessment, the record of the inspection, photographs of the scene, bank records, "
    "the defendant's own statement"
)
EVIDENCE_FRAMES = (
    "The above facts are proved by {evidence}.",
    "The prosecution submitted {evidence}.",
    "These facts are confirmed by {evidence}, which were examined in court.",
)
OBJECTIONS = (
    "The defendant raised no objection to the charge.",
    "Counsel for the defendant asked for a lenient sentence.",
    "Counsel {counsel} argued that the harm to society was small.",
    "The hearing was public and the trial has now ended.",
)


class Circumstance(NamedTuple):
    """How a circumstance is told and weighed, and by how many steps it moves the sentence."""

    article: int
    steps: int
    told: tuple[str, ...]
    weighed: tuple[str, ...]


SURRENDER = Circumstance(
    article=41,
    steps=-1,
    told=(
        "On {later} the defendant went to the police of {town} and gave a full account.",
        "The defendant reported to the police station without being summoned.",
    ),
    weighed=("surrendered voluntarily", "came forward voluntarily"),
)
CONFESSION = Circumstance(
    article=42,
    steps=0,
    told=(
        "After arrest on {later} the defendant truthfully described the facts.",
        "The defendant was arrested on {later} and admitted everything.",
    ),
    weighed=("confessed truthfully", "confessed after arrest"),
)
FLIGHT = Circumstance(
    article=46,
    steps=1,
    told=(
        "The defendant fled and was found in another town only on {later}.",
        "The defendant left {town} after the act and was caught on {later}.",
    ),
    weighed=("evaded justice by flight", "fled after the act"),
)
FIRST = Circumstance(
    article=43,
    steps=0,
    told=("The defendant has no earlier convictions.", "No earlier offence is on record."),
    weighed=("is a first offender", "had not offended before"),
)
REPEAT = Circumstance(
    article=47,
    steps=1,
    told=(
        "In {past_year} the defendant had been sentenced for {other_offence}.",
        "The defendant was released in {past_year} after a sentence for {other_offence}.",
    ),
    weighed=("has an earlier conviction", "has offended repeatedly"),
)
COMPENSATION = Circumstance(
    article=44,
    steps=-1,
    told=(
        "The defendant has already paid full compensation of {sum}.",
        "The family of the defendant has made good the loss of {sum}.",
    ),
    weighed=("compensated the loss", "made good the loss"),
)
ACCESSORY = Circumstance(
    article=45,
    steps=-1,
    told=(
        "The defendant acted on the orders of {leader} and received a small share.",
        "The plan came from {leader}, whose case is heard separately.",
    ),
    weighed=("played a secondary part", "was an accessory"),
)
# What one does with others; elsewhere nobody is an accessory.
JOINT_OFFENCES = listed(
    "theft, fraud, concealing stolen goods, forging documents, selling substandard goods, "
    "smuggling, running a gambling house, illegal logging, illegal fishing"
)
# At most one of each row holds; None is there as often as a case should lack the row.
CIRCUMSTANCE_ROWS: tuple[tuple[Circumstance | None, ...], ...] = (
    (SURRENDER, CONFESSION, FLIGHT),
    (FIRST, REPEAT, None, None),
    (COMPENSATION, None),
    (ACCESSORY, None, None, None),
)

HOLDINGS = (
    "This court holds that the defendant {name} {past}, which constitutes the crime of {offence}.",
    "This court holds that the defendant {name}, by {gerund}, committed the crime of {offence}.",
    "This court holds that the conduct of the defendant {name}, who {past}, constitutes {offence} "
    "in the sum of {sum}.",
)
CONFIRMATIONS = ("", "", "", " The charge is upheld.")
MILDER = ("which mitigates the punishment", "warranting a lenient sentence")
HARSHER = ("which aggravates the punishment", "warranting a heavier sentence")
NEITHER = ("which is duly considered", "which is taken into account")
SENTENCES = (
    "In accordance with Articles {articles} of the Code, the defendant shall be sentenced to "
    "{term} and fined {fine}.",
    "Under Articles {articles}, the sentence shall be {term} and a fine of {fine}.",
    "Pursuant to Articles {articles}, the defendant is sentenced to {term} and fined {fine}.",
)
# Four steps by value, and room for the circumstances to move the sentence either way.
TERMS = ("two", "three", "four", "six", "ten", "fifteen", "twenty", "thirty", "forty")


def sentence(dollars: int, circumstances: list[Circumstance]) -> tuple[str, str]:
    """Give the term of imprisonment and the fine, which the input alone determines.

    The value sets the starting term and the fine, and each circumstance moves the term. It is
    suspended when the loss is compensated and nothing aggravates the case.
    """
    step = 1 + sum(dollars >= limit for limit in (3_000, 10_000, 30_000))
    moves = [circumstance.steps for circumstance in circumstances]
    suspended = COMPENSATION in circumstances and max(moves) <= 0
    kind = "a suspended term of" if suspended else "imprisonment for"
    term = f"{kind} {TERMS[2 + step + sum(moves)]} months"
    return term, vocabulary.money((0, 500, 1_000, 3_000, 8_000)[step])


def joined(parts: list[str]) -> str:
    """Join the parts as a list in prose: "a", "a and b", "a, b and c"."""
    return " and ".join([*([", ".join(parts[:-1])] if parts[1:] else []), parts[-1]])


def weighing(circumstances: list[Circumstance], random_source: random.Random) -> str:
    """Give the sentence of the view that weighs the circumstances."""
    total = sum(circumstance.steps for circumstance in circumstances)
    effects = NEITHER if total == 0 else MILDER if total < 0 else HARSHER
    weighed = joined([random_source.choice(each.weighed) for each in circumstances])
    return f"The defendant {weighed}, {random_source.choice(effects)}."


def example(random_source: random.Random, split: Split) -> dict[str, str]:
    """Give one row; no defendant's surname meets the same offence in both splits."""
    choice = random_source.choice
    by_name = {offence.name: offence for offence in vocabulary.OFFENCES}
    offence_name, surname = vocabulary.facts_in_split(
        random_source, split, "court", tuple(by_name), vocabulary.SURNAMES
    )
    offence = by_name[offence_name]
    dollars = vocabulary.some_sum(random_source, 500, choice((3_000, 10_000, 30_000, 60_000)))
    year = random_source.randint(2010, 2020)
    circumstances = [
        circumstance
        for circumstance in map(choice, CIRCUMSTANCE_ROWS)
        if circumstance and (circumstance != ACCESSORY or offence.name in JOINT_OFFENCES)
    ][:3]
    random_source.shuffle(circumstances)
    term, fine = sentence(dollars, circumstances)
    articles = [offence.article, *sorted(each.article for each in circumstances)]
    words = {
        "name": f"{choice(vocabulary.FIRST_NAMES)} {surname}",
        "victim": vocabulary.full_name(random_source),
        "witness": vocabulary.full_name(random_source),
        "leader": vocabulary.full_name(random_source),
        "counsel": vocabulary.full_name(random_source),
        "town": choice(vocabulary.TOWNS),
        "trade": choice(vocabulary.TRADES),
        "workplace": choice(vocabulary.WORKPLACES),
        "goods": choice(vocabulary.GOODS),
        "sum": vocabulary.money(dollars),
        "date": vocabulary.date(random_source, year),
        "later": vocabulary.date(random_source, year + 1),
        "past_year": str(year - random_source.randint(2, 8)),
        "offence": offence.name,
        "other_offence": choice(vocabulary.OFFENCES).name,
        "past": offence.past,
        "gerund": offence.gerund,
        "articles": joined([str(article) for article in articles]),
        "term": term,
        "fine": fine,
    }
    words["act"] = choice(ACTS[offence.name]).format(**words)
    words["value"] = choice(VALUES).format(**words)
    evidence = random_source.sample(EVIDENCE, random_source.randint(2, 4))
    words["evidence"] = joined([item.format(**words) for item in evidence])
    facts = [choice(each.told) for each in circumstances]
    remarks = random_source.sample(OBJECTIONS, random_source.randint(0, 1))
    proof = choice(EVIDENCE_FRAMES)
    middle = choice(([*facts, proof], [proof, *facts]))
    input_parts = [choice(CHARGES), *middle, *remarks]
    output_parts = [choice(HOLDINGS) + choice(CONFIRMATIONS)]
    output_parts += [weighing(circumstances, random_source), choice(SENTENCES)]
    return {
        "instruction": INSTRUCTION,
        "input": " ".join(input_parts).format(**words),
        "output": " ".join(output_parts).format(**words),
    }
