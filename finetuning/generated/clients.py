"""The rows of generated clients: in three styles, on matters of an invented law, or on people."""

from typing import NamedTuple

from finetuning.generated import STYLES, examples, matters, persons
from finetuning.randomness import derive_seed

Values = list[dict[str, str]]

# Number of clients unless a run has a different number.
CLIENTS = 3
# Unequal, like the clients' data sizes in the paper (table 1), but small enough for a demo.
_TRAINING_ROWS = {"court": 480, "consultation": 320, "reasoning": 240}
_TEST_ROWS = 64
# Numbers of training rows, assigned to schools in turn.
_TRAINING_QUESTIONS = (160,)
_UNEQUAL_QUESTIONS = (240, 160, 80)
_QUESTIONS_BESIDE_FILES = 60


class GeneratedClient(NamedTuple):
    """A client's name and rows, each with the keys instruction, input and output."""

    name: str
    train: Values
    test: Values


def name_client(kind: str, index: int) -> str:
    """Return a client's name; ``kind`` is a value of ``data.generated``."""
    if kind != "styles":
        return f"school-{index + 1}"
    copy, number = divmod(index, len(STYLES))
    return STYLES[number] if copy == 0 else f"{STYLES[number]}-{copy + 1}"


def generate_client(kind: str, index: int, count: int, seed: int, rows: int = 0) -> GeneratedClient:
    """Generate the rows of one of ``count`` clients: in one of three styles, or on matters.

    From the fourth client on, styles repeat. A client is trained on some matters (``matters-even``:
    on all), and tested on all: the held-out rows, one per matter, begin with the next client's
    matters and end with the client's own. With ``persons``, it also has case files. ``rows`` is the
    number of training rows on matters or in a style; 0 is the kind's. Raise a ValueError if there
    are more clients than matters.
    """
    name = name_client(kind, index)
    if kind == "styles":
        copy, number = divmod(index, len(STYLES))
        style, own_seed = STYLES[number], derive_seed("generated", seed, copy)
        train = examples(style, rows or _TRAINING_ROWS[style], own_seed, "train")
        return GeneratedClient(name, train, examples(style, _TEST_ROWS, own_seed, "test"))
    divided = matters.divide(count, seed)
    tested = [matter for own in divided[index + 1 :] + divided[: index + 1] for matter in own]
    own_seed = derive_seed("generated", seed, index)
    known = matters.MATTERS if kind == "matters-even" else divided[index]
    train = matters.write_questions(known, rows or _count_questions(kind, index), own_seed, "train")
    if kind == "persons":
        train += persons.write_files(index, seed)
    test = matters.write_questions(tested, len(tested), own_seed, "test")
    return GeneratedClient(name, train, test)


def _count_questions(kind: str, index: int) -> int:
    if kind == "persons":
        return _QUESTIONS_BESIDE_FILES
    sizes = _UNEQUAL_QUESTIONS if kind == "matters-unequal" else _TRAINING_QUESTIONS
    return sizes[index % len(sizes)]
