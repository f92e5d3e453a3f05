"""The texts of two clients: one colludes with the attacker, the other is attacked."""

import random
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from bench.attack.cells import Sizes
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import Example, tokenize
from finetuning.generated import examples
from finetuning.settings import DataSettings
from finetuning.tasks.reading import read_task_rows

GENERATED = "generated"
_COLLUDING, _ATTACKED = "court", "consultation"
_LONGEST = 192  # maximum number of tokens of an example; the input is truncated first


class Texts:
    """Tokenized texts; all texts of a client begin with the same template and instruction.

    The three ``parts`` are the colluding client's texts, which the attacker knows, and the attacked
    client's held-out and training texts.
    """

    def __init__(self, name: str, tokenizer: Any, sizes: Sizes, parts: Iterable[list[Row]]) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.sizes = sizes
        self.padding = int(tokenizer.pad_token_id)
        examples = (tokenize(rows, tokenizer, _LONGEST)[0] for rows in parts)
        self.colluding, self.attacked, self.own = examples
        # Lengths of the common beginnings, in tokens.
        self.known_of_colluding, self.known = _common(self.colluding), _common(self.attacked)
        self.beginning = self.attacked[0].tokens[: self.known]

    def training_rows(self) -> list[torch.Tensor]:
        """Return the first colluding texts, truncated like the attacked texts."""
        length = self.known_of_colluding + self.sizes.longest
        return [example.tokens[:length] for example in self.colluding[: self.sizes.texts]]

    def covered(self) -> float:
        """Return the share of the truncated attacked texts' tokens that are in `training_rows`."""
        have = torch.cat([row[self.known_of_colluding :] for row in self.training_rows()])
        end = self.known + self.sizes.longest
        read = torch.cat([example.tokens[self.known : end] for example in self.attacked])
        return float(torch.isin(read, have).float().mean())

    def choose(self, count: int, seed: int) -> list[Example]:
        """Choose attacked texts."""
        return random.Random(seed).sample(list(self.attacked), count)

    def attacked_rows(self, count: int, seed: int) -> list[torch.Tensor]:
        """Choose attacked texts and truncate them some tokens after the known beginning."""
        end = self.known + self.sizes.longest
        return [example.tokens[:end] for example in self.choose(count, seed)]

    def text_of(self, tokens: torch.Tensor) -> str:
        """Decode tokens to text, without special tokens."""
        text: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text


def generated_texts(tokenizer: Any, sizes: Sizes) -> Texts:
    """Generate the demonstration's texts: the court colludes, the consultancy is attacked."""

    def rows(style: str, split: Any) -> list[Row]:
        generated = examples(style, sizes.texts, 0, split)
        return [Row(parse_messages(row), style, row) for row in generated]

    parts = (rows(_COLLUDING, "train"), rows(_ATTACKED, "test"), rows(_ATTACKED, "train"))
    return Texts(name=GENERATED, tokenizer=tokenizer, sizes=sizes, parts=parts)


def texts_in(folder: Path, tokenizer: Any, sizes: Sizes) -> Texts:
    """Read the texts of two clients from BoolQ, at most ``sizes.texts`` rows of each part.

    The folder has SuperGLUE's ``train.jsonl`` and ``val.jsonl``. The first half of the training
    rows belongs to the colluding client, the second half to the attacked client. Raise
    ``DataError``, which names file, line and reason, if rows are missing or malformed.
    """
    settings = DataSettings(task="boolq")
    training, held_out = (
        read_task_rows(folder / f"{part}.jsonl", settings) for part in ("train", "val")
    )
    half = len(training) // 2
    parts = (training[:half], held_out, training[half:])
    most = (rows[: sizes.texts] for rows in parts)
    return Texts(name=folder.name, tokenizer=tokenizer, sizes=sizes, parts=most)


def _common(examples: Sequence[Example]) -> int:
    """Return the length of the examples' common beginning, in tokens."""
    columns = zip(*(example.tokens.tolist() for example in examples), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
