"""Questions of law whose answers occur only in one institution's training data.

Each of twelve matters has one Article of the Code of the Province; the questions on a matter
mention neither the Article nor its rule. The matters are divided among the institutions, so a model
can learn the Articles of other institutions only from joint training.
"""

from collections.abc import Sequence

from finetuning.generated.vocabulary import WORDS, RandomWords, Split, read_texts

_TEXTS = read_texts("matters")
MATTERS: tuple[str, ...] = tuple(_TEXTS["matters"])


def divide(institutions: int, seed: int) -> list[list[str]]:
    """Shuffle the matters and divide them evenly among the institutions.

    Raise a ValueError if there are more institutions than matters.
    """
    if institutions > len(MATTERS):
        raise ValueError(f"{len(MATTERS)} matters can't be divided among {institutions} clients")
    shuffled = RandomWords(f"matters {seed}").sample(MATTERS, len(MATTERS))
    return [shuffled[number::institutions] for number in range(institutions)]


def write_questions(
    matters: Sequence[str], count: int, seed: int, split: Split
) -> list[dict[str, str]]:
    """Return `count` rows, with keys instruction, input and output, that cycle through the matters.

    No combination of surname and matter occurs in both splits.
    """
    draw = RandomWords(f"questions {split} {seed}")
    answers: dict[str, str] = {}
    while len(answers) < count:
        matter = matters[len(answers) % len(matters)]
        case = _TEXTS["matters"][matter]
        _, surname = draw.facts_in_split(split, "matters", (matter,), WORDS["surnames"])
        name, town = f"{draw.word('first_names')} {surname}", draw.word("towns")
        question = draw.choice(case["questions"]).format(name=name, town=town)
        answers.setdefault(question, _TEXTS["answer"].format(**case))
    return [{"instruction": "", "input": q, "output": answer} for q, answer in answers.items()]


def article(matter: str) -> int:
    """Return the number of a matter's Article."""
    return int(_TEXTS["matters"][matter]["article"])


def beginnings() -> dict[int, str]:
    """Return the beginning of the answer for each Article, keyed by the Article's number."""
    text = _TEXTS["answer"].partition(",")[0] + ","
    return {article(matter): text.format(article=article(matter)) for matter in MATTERS}
