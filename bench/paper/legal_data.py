"""The rows of FedJudge's clients that models are trained on, answer, and are measured on."""

import functools
from dataclasses import dataclass
from pathlib import Path

from bench.paper.legal import COUNTED
from bench.paper.sizes import FedJudge
from finetuning.data.formats import DataError
from finetuning.data.prompts import Prompt, prompts_of_answers
from finetuning.data.rows import Row, read_rows
from finetuning.data.tokenization import Example, tokenize
from finetuning.files import Stamps, stamps
from finetuning.model.base_model import load_tokenizer

_NO_LIMIT = 2**31


@dataclass(frozen=True)
class LegalRows:
    """A client's rows; those that don't fit are left out, and none is shortened.

    Attributes:
        train: Training rows that fit with their answers.
        prompts: Prompts of held-out rows that fit without their answers, which are answered.
        examples: Held-out rows that fit with their answers, of which the loss is measured.
        counts: How many rows of each kind there are, how many fit, and how many of these are used:
            `COUNTED`.

    """

    train: list[Row]
    prompts: list[Prompt]
    examples: list[Example]
    counts: dict[str, tuple[int, int, int]]


def legal_rows(parts: tuple[Path, Path], model: Path, settings: FedJudge) -> LegalRows:
    """Read a client's rows.

    Args:
        parts: Files of the training rows and of the held-out rows.
        model: Directory of the base model.
        settings: How many rows, of which lengths.

    Raises:
        DataError: There are no rows, or none fits.

    """
    return _legal_rows(parts, tuple(stamps(file) for file in parts), model, settings)


# A cell trains on the rows of all clients, and then scores them.
@functools.lru_cache(maxsize=3)
def _legal_rows(
    parts: tuple[Path, Path], _stamps: tuple[Stamps, ...], model: Path, settings: FedJudge
) -> LegalRows:
    tokenizer = load_tokenizer(model)
    train, held_out = (read_rows(file) for file in parts)
    kept: list[list[Example]] = []
    for file, rows in zip(parts, (train, held_out), strict=True):
        examples, _ = tokenize(rows, tokenizer, _NO_LIMIT)
        kept.append([own for own in examples if len(own.tokens) <= settings.max_length])
        if not kept[-1]:
            raise DataError(f"{file}: no row has at most max-length = {settings.max_length} tokens")
    prompts = [
        prompt
        for prompt in prompts_of_answers(held_out, tokenizer, _NO_LIMIT)
        if len(prompt.tokens) <= settings.prompt_length
    ]
    if not prompts:
        raise DataError(
            f"{parts[1]}: no question has at most prompt-length = {settings.prompt_length} tokens"
        )
    fitting = list(dict.fromkeys(example.row for example in kept[0]))
    used = fitting[: settings.rows or None]
    answered = prompts[: settings.questions or None]
    measured = kept[1][: settings.questions or None]
    counts = (
        (len(train), len(fitting), len(used)),
        (len(held_out), len(prompts), len(answered)),
        (len(held_out), len(kept[1]), len(measured)),
    )
    return LegalRows(
        train=[train[row] for row in used],
        prompts=answered,
        examples=measured,
        counts=dict(zip(COUNTED, counts, strict=True)),
    )
