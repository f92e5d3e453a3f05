"""The texts of two clients: one colludes with the attacker, the other is attacked."""

import hashlib
import json
import random
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from finetuning.data.rows import Row, parse_messages, parse_rows
from finetuning.data.tokenization import Example, tokenize
from finetuning.generated import examples

GENERATED = "generated"
_COLLUDING, _ATTACKED = "court", "consultation"
_LONGEST = 192  # maximum number of tokens of an example; the input is truncated first


class Texts:
    """Tokenized texts; all texts of a client begin with the same template and instruction."""

    def __init__(
        self, name: str, tokenizer: Any, colluding: list[Row], attacked: list[Row], own: list[Row]
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.padding = int(tokenizer.pad_token_id)
        parts = (tokenize(rows, tokenizer, _LONGEST)[0] for rows in (colluding, attacked, own))
        # The texts that the attacker knows; the attacked client's held-out and training texts.
        self.colluding, self.attacked, self.own = parts
        # Lengths of the common beginnings, in tokens.
        self.known_of_colluding, self.known = _common(self.colluding), _common(self.attacked)
        self.beginning = self.attacked[0].tokens[: self.known]

    def digest(self) -> str:
        """Return a SHA-256 digest of all tokens."""
        parts = (self.colluding, self.attacked, self.own)
        tokens = [[example.tokens.tolist() for example in part] for part in parts]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def training_rows(self, count: int, longest: int) -> list[torch.Tensor]:
        """Return the first ``count`` colluding texts, truncated like the attacked texts."""
        length = self.known_of_colluding + longest
        return [example.tokens[:length] for example in self.colluding[:count]]

    def covered(self, count: int, longest: int) -> float:
        """Return the share of the truncated attacked texts' tokens that are in `training_rows`."""
        known = self.known_of_colluding
        have = torch.cat([row[known:] for row in self.training_rows(count, longest)])
        end = self.known + longest
        read = torch.cat([example.tokens[self.known : end] for example in self.attacked])
        return float(torch.isin(read, have).float().mean())

    def choose(self, count: int, seed: int) -> list[Example]:
        """Choose attacked texts."""
        return random.Random(seed).sample(list(self.attacked), count)

    def attacked_rows(self, count: int, longest: int, seed: int) -> list[torch.Tensor]:
        """Choose attacked texts and truncate them ``longest`` tokens after the known beginning."""
        return [example.tokens[: self.known + longest] for example in self.choose(count, seed)]

    def text_of(self, tokens: torch.Tensor) -> str:
        """Decode tokens to text, without special tokens."""
        text: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text


def generated_texts(tokenizer: Any, count: int) -> Texts:
    """Generate the demonstration's texts: the court colludes, the consultancy is attacked."""

    def rows(style: str, split: Any) -> list[Row]:
        found = examples(style, count, 0, split)
        return [Row(parse_messages(row), style, row) for row in found]

    return Texts(
        name=GENERATED,
        tokenizer=tokenizer,
        colluding=rows(_COLLUDING, "train"),
        attacked=rows(_ATTACKED, "test"),
        own=rows(_ATTACKED, "train"),
    )


def texts_in(folder: Path, tokenizer: Any, count: int) -> Texts:
    """Read the texts of two clients from BoolQ, at most ``count`` rows of each part.

    The folder has SuperGLUE's ``train.jsonl`` and ``val.jsonl``. The first half of the training
    rows belongs to the colluding client, the second half to the attacked client. Raise
    ``DataError``, which names file, line and reason, if rows are missing or malformed.
    """
    training = _boolq(folder / "train.jsonl")
    half = len(training) // 2
    return Texts(
        name=folder.name,
        tokenizer=tokenizer,
        colluding=training[:half][:count],
        attacked=_boolq(folder / "val.jsonl")[:count],
        own=training[half:][:count],
    )


def _boolq(file: Path) -> list[Row]:
    def parse(origin: str, value: Any) -> Row:
        texts = {"instruction": value["passage"], "input": value["question"]}
        messages = parse_messages(texts | {"output": "yes" if value["label"] else "no"})
        return Row(messages, origin, value)

    return parse_rows(file, parse, advice="download it again")


def _common(examples: Sequence[Example]) -> int:
    """Return the length of the examples' common beginning, in tokens."""
    columns = zip(*(example.tokens.tolist() for example in examples), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
