"""The words all generated text is made of: people, towns, goods, sums, dates, offences.

Everything here is invented, the Code of the Province and its articles included. The three
styles and the background draw on the same lists, so that what a model reads in one of them
it can use in another; what differs from style to style is how the words are put together.

Nouns kept without an article begin with a consonant, so that "a" always fits before them.
"""

import hashlib
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

Split = Literal["train", "test"]


def listed(text: str) -> tuple[str, ...]:
    """Give the items of a text that lists them with ", " between."""
    return tuple(text.split(", "))


FIRST_NAMES = listed(
    "Alice, Anna, Clara, Dora, Edith, Eva, Grace, Helen, Irene, Julia, Laura, Lucy, Maria, Nora, "
    "Olive, Paula, Rose, Sarah, Vera, Wilma, Adam, Albert, Carl, David, Edgar, Felix, Frank, "
    "George, Henry, Hugo, Jacob, Leon, Martin, Oscar, Paul, Peter, Simon, Thomas, Victor, Walter"
)
SURNAMES = listed(
    "Abbot, Arden, Barlow, Bexley, Calder, Corwin, Dalby, Dunmore, Elwood, Farrow, Fenwick, "
    "Garrick, Glover, Hadley, Hollis, Ingram, Jarvis, Kemble, Kendrick, Langton, Lorne, Marlow, "
    "Merton, Norwell, Oakley, Ormond, Parrish, Penrose, Quimby, Ramsey, Rowland, Saxby, Selwyn, "
    "Tallis, Thorne, Tilney, Upton, Varley, Vickers, Wadham, Warrick, Westcott, Winslow, Wyatt, "
    "Yardley"
)
TOWNS = listed(
    "Amberly, Brightsea, Clearbrook, Coldwell, Eastlow, Elmford, Fairhaven, Foxdale, Greyport, "
    "Highwater, Kingsmere, Larkfield, Marshgate, Millbrook, Northwick, Oakmere, Pinewell, "
    "Ravensford, Redcliff, Silverton, Southmarsh, Stonebridge, Thornhill, Westmoor"
)
MONTHS = listed(
    "January, February, March, April, May, June, July, August, September, October, November, "
    "December"
)
TRADES = listed(
    "baker, barber, bookkeeper, bricklayer, butcher, carpenter, clerk, cook, driver, farmer, "
    "gardener, grocer, mechanic, miller, nurse, painter, plumber, printer, shoemaker, tailor, "
    "teacher, waiter"
)
WORKPLACES = listed(
    "bakery, brewery, building company, car workshop, clothes shop, dairy, farm, furniture store, "
    "hotel, laundry, pharmacy, printing house, restaurant, sawmill, transport company, warehouse"
)
DURABLE_GOODS = listed(
    "a bicycle, a camera, a computer, a gold ring, a motorcycle, a mobile phone, a piano, "
    "a refrigerator, a set of tools, a television, a washing machine"
)
GOODS = DURABLE_GOODS + listed(
    "a roll of copper wire, a load of timber, five boxes of wine, ten sacks of grain"
)
HOUSEHOLD = listed(
    "phone, laptop, sofa, fridge, bike, washing machine, heater, camera, used car, TV"
)
VEHICLES = listed("van, bike, scooter, taxi, truck, bus, motorbike, tractor, trailer, delivery car")
FRIENDS = listed(
    "buddy, cousin, brother, neighbour, roommate, flatmate, workmate, nephew, pal, sister"
)
NUMBERS = listed("zero, one, two, three, four, five, six, seven, eight, nine, ten")


class Offence(NamedTuple):
    """An offence of the Code of the Province; the offender "took" or is "taking" an `object`."""

    name: str
    article: int
    taking: str
    took: str
    object: str

    @property
    def gerund(self) -> str:
        """The act as a noun: "secretly taking the property of another person"."""
        return f"{self.taking} {self.object}"

    @property
    def past(self) -> str:
        """The act as told of someone: "secretly took the property of another person"."""
        return f"{self.took} {self.object}"


OFFENCES = (
    Offence("theft", 118, "secretly taking", "secretly took", "the property of another person"),
    Offence("fraud", 121, "gaining", "gained", "the property of another person by deception"),
    Offence("embezzlement", 127, "keeping", "kept", "money entrusted by another person"),
    Offence("concealing stolen goods", 133, "hiding", "hid", "goods known to be stolen"),
    Offence("damaging property", 137, "breaking", "broke", "the property of another person"),
    Offence("causing minor injury", 142, "hurting", "hurt", "the body of another person"),
    Offence("forging documents", 158, "making", "made", "false official papers"),
    Offence("tax evasion", 171, "concealing", "concealed", "income from the tax office"),
    Offence("selling substandard goods", 176, "selling", "sold", "goods below the standard"),
    Offence("smuggling", 179, "carrying", "carried", "goods across the border without duty"),
    Offence("accepting bribes", 189, "taking", "took", "gifts in return for an official favour"),
    Offence("drunk driving", 203, "driving", "drove", "a motor vehicle on a road while drunk"),
    Offence("refusing to pay a judgment", 215, "evading", "evaded", "the payment of a judgment"),
    Offence("running a gambling house", 221, "gathering", "gathered", "people to gamble for gain"),
    Offence("illegal logging", 231, "felling", "felled", "trees without a felling licence"),
    Offence("illegal fishing", 234, "catching", "caught", "fish with forbidden gear"),
)
OFFENCE_NAMES = tuple(offence.name for offence in OFFENCES)


def money(dollars: int) -> str:
    """Give a sum as text: 2400 is "$2,400"."""
    return f"${dollars:,}"


def some_sum(random_source: random.Random, lowest: int, highest: int) -> int:
    """Draw a sum from `lowest` to `highest` dollars, both included, in whole hundreds."""
    return random_source.randint(lowest // 100, highest // 100) * 100


def full_name(random_source: random.Random) -> str:
    """Draw a person, such as "Nora Farrow"."""
    return f"{random_source.choice(FIRST_NAMES)} {random_source.choice(SURNAMES)}"


def date(random_source: random.Random, year: int) -> str:
    """Draw a day of `year`, such as "3 March 2015"."""
    return f"{random_source.randint(1, 28)} {random_source.choice(MONTHS)} {year}"


def capitalised(sentence: str) -> str:
    """Give the sentence with a capital first letter and the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def split_of(*facts: str) -> Split:
    """Say on which side a combination of facts lies: a fixed fifth of them is "test"."""
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % 5 == 0 else "train"


def facts_in_split(
    random_source: random.Random, split: Split, style: str, *lists: Sequence[str]
) -> tuple[str, ...]:
    """Draw one item of each list, such that the combination lies in `split`.

    The words of both splits are the same, only their combinations differ: a model can learn
    every word of a held-out example from the training examples, but never the whole of it.
    """
    while True:
        facts = tuple(random_source.choice(items) for items in lists)
        if split_of(style, *facts) == split:
            return facts
