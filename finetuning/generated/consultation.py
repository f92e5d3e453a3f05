"""Consultations: a layperson's short question and a consultant's friendly answer.

After figure 1(b) of the FedJudge paper: everyday trouble, told in a few colloquial words, and
advice in plain words that takes up what was asked, how much or how long, and where to go.
"""

import random
from typing import NamedTuple

from finetuning.generated import vocabulary
from finetuning.generated.vocabulary import Split, listed

INSTRUCTION = "Please answer the following question from a client who asks for legal advice."

# The extents of a matter, a sum or a time, and whether each is too large for the help desk.
SUMS = {vocabulary.money(dollars): dollars > 2_000 for dollars in range(300, 5_000, 200)}
TIMES = {
    f"{vocabulary.NUMBERS[count]} {unit}": unit == "months" and count > 3
    for unit, counts in (("weeks", range(2, 9)), ("months", range(2, 11)))
    for count in counts
}


class Matter(NamedTuple):
    """A matter; its questions and openings name both the {thing} and the {extent}."""

    things: tuple[str, ...]
    extents: dict[str, bool]
    questions: tuple[str, ...]
    openings: tuple[str, ...]
    advice: tuple[str, ...]


MATTERS = {
    "wages": Matter(
        vocabulary.WORKPLACES,
        TIMES,
        (
            "my boss at the {thing} hasn't paid me for {extent}",
            "haven't seen a cent from the {thing} in {extent}",
        ),
        (
            "{extent} without pay from a {thing} isn't okay.",
            "A {thing} can't just sit on your pay for {extent}.",
        ),
        (
            "Dig out your contract, payslips and any chats about your shifts.",
            "Text your boss so you've got it in writing.",
            "Ask your workmates to speak up with you.",
        ),
    ),
    "deposit": Matter(
        listed("flat, room, studio, house, garage, shop space, basement flat, workshop"),
        SUMS,
        (
            "my landlord won't give back my {extent} deposit for the {thing}",
            "moved out of the {thing} and she's keeping my {extent} deposit",
        ),
        (
            "A landlord can't hang on to {extent} for a {thing} without showing real damage.",
            "You've got a good shot at your {extent} back once you've left the {thing} clean.",
        ),
        (
            "Get your photos and the handover sheet together.",
            "Ask for a list of what's supposed to be broken.",
            "Check what the lease says about the deposit.",
        ),
    ),
    "rent": Matter(
        listed("flat, room, studio, house, garage, shop space, basement flat, workshop, cottage"),
        TIMES,
        (
            "I'm {extent} behind on rent for my {thing} and they want me out",
            "lost my job, now I owe {extent} of rent on the {thing}",
        ),
        (
            "Being {extent} late on a {thing} doesn't mean you're out tomorrow.",
            "Don't panic, nobody can change the locks of your {thing} over {extent} of rent.",
        ),
        (
            "Offer to pay in bits and keep a copy of the offer.",
            "Pay whatever you can spare now, it'll show good will.",
            "Ask the town office if there's help with housing costs.",
        ),
    ),
    "refund": Matter(
        vocabulary.HOUSEHOLD,
        SUMS,
        (
            "bought a {thing} for {extent}, it's broken and they won't refund me",
            "the {thing} I got online for {extent} turned out to be junk",
        ),
        (
            "If a {thing} for {extent} breaks that fast, the shop has to fix it or pay you back.",
            "You shouldn't be stuck with a dud {thing} that cost you {extent}.",
        ),
        (
            "Keep the receipt and take a short video of the fault.",
            "Give the seller one fair chance to fix it.",
            "Don't let them fob you off with a voucher.",
        ),
    ),
    "loan": Matter(
        vocabulary.FRIENDS,
        SUMS,
        (
            "lent my {thing} {extent} and now there's just silence",
            "my {thing} borrowed {extent} off me and won't pay it back",
        ),
        (
            "Lending a {thing} {extent} and hearing nothing is rough, but you aren't stuck.",
            "Even with a {thing}, {extent} is still a debt and you can ask for it.",
        ),
        (
            "Screenshot every chat where the money comes up.",
            "A bank slip works fine as proof if there's no note.",
            "Try to get a signed line saying when it'll be paid.",
        ),
    ),
    "divorce": Matter(
        listed("house, car, savings, dog, flat, furniture, camper, shop, boat, garden plot"),
        TIMES,
        (
            "split up {extent} ago and my ex won't let go of the {thing}",
            "we've lived apart for {extent}, can my ex just keep the {thing}",
        ),
        (
            "After {extent} apart you can sort out the {thing} together with the divorce.",
            "The {thing} isn't lost just because you've been apart for {extent}.",
        ),
        (
            "What you bought while married usually gets shared.",
            "Write down what you owned before and what came later.",
            "If you two can still talk, a mediator's cheaper.",
        ),
    ),
    "accident": Matter(
        vocabulary.VEHICLES,
        SUMS,
        (
            "some guy's {thing} hit my parked car, garage wants {extent}",
            "got bumped by a {thing}, that's {extent} and they blame me",
        ),
        (
            "If that {thing} ran into you, {extent} for repairs is on their insurance.",
            "Don't pay the {extent} yourself before it's clear what the {thing} did.",
        ),
        (
            "Send their insurer the police note and your photos.",
            "Anyone who saw it? Grab their number.",
            "Don't sign anything that says it was your fault.",
        ),
    ),
    "fine": Matter(
        listed(
            "red light, bus lane, zebra crossing, parking spot, school zone, yellow line, toll road"
        ),
        SUMS,
        (
            "got a {extent} fine over some {thing} and I wasn't even driving",
            "they're asking {extent} because of a {thing}, feels like a rip-off",
        ),
        (
            "You don't have to swallow a {extent} ticket over a {thing} if it's wrong.",
            "For a {thing}, {extent} does sound like a lot, so check the notice.",
        ),
        (
            "Look at the date, the plate and the photo on it.",
            "You've only got two weeks to object, so don't wait.",
            "Say in one short note who was driving.",
        ),
    ),
    "noise": Matter(
        listed("drums, dog, parties, TV, rooster, drilling, piano, loud bikes, karaoke, workshop"),
        TIMES,
        (
            "{extent} of the {thing} next door, it's driving me nuts",
            "no sleep for {extent} thanks to my neighbour and the {thing}",
        ),
        (
            "Putting up with the {thing} next door for {extent} is more than enough.",
            "After {extent} I'd be tired too, and no, you don't have to bear the {thing}.",
        ),
        (
            "Keep a little diary with the times it gets bad.",
            "A friendly chat over the fence often does the trick.",
            "Tell the landlord, you might get some rent off.",
        ),
    ),
    "inheritance": Matter(
        listed("grandpa, grandma, aunt, uncle, dad, mom, godmother, stepdad, great-aunt, cousin"),
        SUMS,
        (
            "my {thing} left me {extent} but my brother says there's no will",
            "my late {thing} had {extent} in the bank and I got nothing",
        ),
        (
            "I'm sorry about your {thing}. The {extent} won't vanish just because there's a row.",
            "My condolences for your {thing}. Family can usually claim a share of the {extent}.",
        ),
        (
            "Ask the town registry whether a will was filed.",
            "Check for debts too before you say yes.",
            "Get a copy of the family register.",
        ),
    ),
    "scam": Matter(
        listed("job ad, text, phone call, chat group, website, lottery mail, travel site"),
        SUMS,
        (
            "fell for a fake {thing} and sent them {extent}",
            "I think I've been conned out of {extent} through a {thing}",
        ),
        (
            "Falling for a fake {thing} happens to lots of folks, let's try to save the {extent}.",
            "A fake {thing} that took {extent} off you is fraud, plain and simple.",
        ),
        (
            "Call your bank right now and ask them to stop the transfer.",
            "Don't delete anything, the police will want to see it.",
            "Don't send more, even if they promise it all back.",
        ),
    ),
    "firing": Matter(
        vocabulary.WORKPLACES,
        TIMES,
        (
            "got fired from the {thing} out of the blue after {extent}",
            "the {thing} kicked me out with no notice, been there {extent}",
        ),
        (
            "Even after just {extent}, a {thing} can't show you the door with no notice.",
            "Getting fired by a {thing} after {extent} hurts, but you've got rights.",
        ),
        (
            "Ask for the reason in black and white.",
            "Don't sign any paper that says you quit.",
            "Sign on at the job office this week.",
        ),
    ),
    "repairs": Matter(
        listed("plumber, roofer, painter, builder, mechanic, tiler, gardener, mover, glazier"),
        SUMS,
        (
            "paid a {thing} {extent} up front and the job's a total mess",
            "the {thing} took {extent} and never finished the job",
        ),
        (
            "A {thing} who took {extent} has to finish the job properly.",
            "You've paid {extent}, so you can expect decent work from a {thing}.",
        ),
        (
            "Take pictures of everything that's wrong.",
            "Get another firm to say what fixing it would cost.",
            "Hold back whatever you haven't paid yet.",
        ),
    ),
}

GREETINGS = ("", "", "", "", "hey, ", "hi there, ", "so ", "ok so ", "um, ", "help, ")
PLEAS = (
    *(", what can I do?", ", what now?", ", any tips?", ", is that even legal?", "?"),
    *(", how do I fix this?", ", now what?", ", advice?", ", can they do that?"),
    " here in {town}, who can help?",
)
COMFORTS = ("", "", "Hi! ", "Hey there! ", "Oh no, sorry to hear that! ", "Thanks for asking! ")
SMALL = (
    "No need for court yet, the free help desk in town can sort it out.",
    "You won't need a lawyer for that, just pop into the free help desk.",
    "Give it ten more days, then try the free help desk.",
)
LARGE = (
    "By now I'd get a lawyer and take it to court.",
    "It's gone too far for small talk, so book a lawyer and file a claim.",
    "That's serious enough to let a lawyer write the letter.",
)
FAREWELLS = ("", "", " Good luck!", " You've got this!", " Hang in there!", " Keep me posted!")


def example(random_source: random.Random, split: Split) -> dict[str, str]:
    """Give one row; no matter meets the same thing and the same extent in both splits."""
    choice = random_source.choice
    name = choice(tuple(MATTERS))
    matter = MATTERS[name]
    thing, extent = vocabulary.facts_in_split(
        random_source, split, "consultation " + name, matter.things, tuple(matter.extents)
    )
    words = {"thing": thing, "extent": extent, "town": choice(vocabulary.TOWNS)}
    question = choice(GREETINGS) + choice(matter.questions) + choice(PLEAS)
    if random_source.random() < 0.5:
        question = vocabulary.capitalised(question)
    opening = vocabulary.capitalised(choice(matter.openings).format(**words))
    steps = random_source.sample(matter.advice, choice((1, 1, 2, 2, 3)))
    steps.append(choice(LARGE if matter.extents[extent] else SMALL))
    return {
        "instruction": INSTRUCTION,
        "input": question.format(**words),
        "output": choice(COMFORTS) + opening + " " + " ".join(steps) + choice(FAREWELLS),
    }
