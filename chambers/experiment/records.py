"""What experiments have measured, as files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chambers.experiment.plan import Measure

GLOBAL, BASE = "global", "base"
# The arm of the best constant answer.
CONSTANT = "constant"


@dataclass(frozen=True)
class Record:
    """The values of one model on one group of questions.

    Attributes:
        arm: Name of the arm; ``constant`` for the best answer that is always the same.
        model: ``base``, ``global``, or the client whose model it is.
        seed: Seed of the run.
        group: Name of the group.
        measure: ``loss`` (nats per token of the reference), ``article`` (whether the right one of
            twelve is the likeliest), ``accuracy`` (whether the right candidate is), ``answer``
            (whether greedy decoding gives the reference), a score of what it gives, or the mean
            over rounds of what the client reported: ``distance``, ``penalty_gradient_share``.
        values: One value for each question.

    """

    arm: str
    model: str
    seed: int
    group: str
    measure: Measure
    values: list[float]


def write_records(file: Path, about: Mapping[str, object], records: Iterable[Record]) -> None:
    """Write a line that says what the records are about, and one for each."""
    lines = [json.dumps(about), *(json.dumps(asdict(record)) for record in records)]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_about(file: Path) -> dict[str, Any]:
    """Read what the records in a file are about."""
    with file.open(encoding="utf-8") as lines:
        about: dict[str, Any] = json.loads(next(lines))
    return about


def read_records(file: Path) -> list[Record]:
    """Read the records in a file."""
    _, *lines = file.read_text(encoding="utf-8").splitlines()
    return [Record(**json.loads(line)) for line in lines]
