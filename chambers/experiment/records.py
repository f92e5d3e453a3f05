"""Files of the values that experiments have measured."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chambers.experiment.plan import Measure

GLOBAL, BASE, CONSTANT = "global", "base", "constant"


@dataclass(frozen=True)
class Record:
    """The values of one model on one group of questions."""

    arm: str  # ``constant`` for the best single answer to all questions
    model: str  # ``base``, ``global``, or the client whose model it is
    seed: int
    group: str
    measure: Measure
    values: list[float]  # one value per question, or a single value that the client reported


def write_records(file: Path, about: Mapping[str, object], records: Iterable[Record]) -> None:
    """Write a line that says what the records are about, and a line for each record."""
    lines = [json.dumps(about), *(json.dumps(asdict(record)) for record in records)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_records(file: Path) -> tuple[dict[str, Any], list[Record]]:
    """Return what the records in a file are about, and the records."""
    about, *records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return about, [Record(**record) for record in records]
