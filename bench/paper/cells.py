"""Single measurements: what names them, and the files that keep their results.

A cell says what is measured; a size says how much is trained and scored, and with which settings.
Several tables can have the same cell. Each cell is one JSON file, and no cell is measured again as
long as the settings that its result depends on stay the same.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from finetuning.files import replacing

Method = Literal["bare", "centralised", "serial", "client-batch", "hierarchical"]
LegalMethod = Literal[
    "bare",
    "center",
    "center-client1",
    "center-client2",
    "center-client3",
    "fedjudge-base",
    "fedjudge-cl",
]
Result = dict[str, Any]
# A cell's file: ``cell``, ``settings``, ``versions``, ``result`` and ``seconds``.
Record = dict[str, Any]
LIBRARIES = ("torch", "transformers", "peft", "flwr")


class Cell(Protocol):
    """The members that all kinds of cells have; they are frozen dataclasses."""

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def seed(self) -> int:
        """Seed of the measurement."""
        ...


@dataclass(frozen=True)
class TaskCell:
    """A model's scores on one of FL-GLM's tasks, bare or after training on it.

    Attributes:
        task: Name of the task, as ``data.task``.
        model: The base model's id.
        method: The bare base model, centralised training, or a schedule of FL-GLM.
        adapter: Kind of adapter; empty for the bare model.
        clients: Number of clients; 0 for the bare model.
        period: Optimizer steps of a client between two averages.
        partition: How the rows are divided among the clients: ``data.partition``.
        curve: Whether the model is scored after every period too.
        seed: Seed of the run.

    """

    kind: ClassVar[str] = "task"
    task: str
    model: str
    method: Method
    adapter: Literal["", "lora", "prefix"] = ""
    clients: int = 0
    period: int = 0
    partition: Literal["iid", "label"] = "iid"
    curve: bool = False
    seed: int = 0


@dataclass(frozen=True)
class SplitCell:
    """A split model's answers beside those of the whole model.

    Attributes:
        task: Name of the task, as ``data.task``.
        model: The base model's id.
        seed: Seed of the adapter.

    """

    kind: ClassVar[str] = "split"
    task: str
    model: str
    seed: int = 0


@dataclass(frozen=True)
class TimeCell:
    """The duration of training by a schedule.

    Attributes:
        method: Centralised training, or a schedule of FL-GLM.
        clients: Number of clients.
        seed: Number of the repetition.

    """

    kind: ClassVar[str] = "time"
    method: Method
    clients: int
    seed: int = 0


@dataclass(frozen=True)
class AttackCell:
    """What a decoder reads from the hidden states of another client (FL-GLM section 4.3.3).

    Attributes:
        model: The base model's id.
        decoder: Kind of the decoder.
        head_blocks: Blocks at the client, before what it sends; 0 is the embedding alone.
        seed: Seed of the decoder and of the choice of texts.

    """

    kind: ClassVar[str] = "attack"
    model: str
    decoder: Literal["linear", "transformer"]
    head_blocks: int
    seed: int = 0


@dataclass(frozen=True)
class LegalCell:
    """The scores of a method's models on the rows of FedJudge's three clients.

    Attributes:
        model: The base model's id.
        method: The bare base model, centralised training on the rows of all clients or of one, or a
            strategy, which has a global model and one for each client.
        seed: Seed of the run.

    """

    kind: ClassVar[str] = "legal"
    model: str
    method: LegalMethod
    seed: int = 0


@dataclass(frozen=True)
class SheetsCell:
    """What annotators have scored (FedJudge section 4.3.3).

    Attributes:
        seed: There is one measurement.

    """

    kind: ClassVar[str] = "sheets"
    seed: int = 0


def described(cell: Cell) -> dict[str, Any]:
    """Return a cell as it is written to files."""
    return {"kind": cell.kind, **asdict(cell)}


def name_of(description: Mapping[str, Any]) -> str:
    """Return the name of a described cell's file, without a suffix."""
    text = json.dumps(dict(sorted(description.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    about = description.get("task") or description.get("method") or ""
    return "-".join(part for part in (description["kind"], str(about), digest) if part)


class Results:
    """Recorded results by cell.

    Args:
        records: Contents of cells' files.

    """

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = {name_of(record["cell"]): record for record in records}

    def get(self, cell: Cell) -> Result | None:
        """Return a cell's result, or None if it was not measured."""
        record = self.record(cell)
        return record and record["result"]

    def record(self, cell: Cell) -> Record | None:
        """Return all that is recorded of a cell, or None if it was not measured."""
        return self._records.get(name_of(described(cell)))

    def of_seeds(self, cells: Sequence[Cell]) -> list[Result]:
        """Return the results of cells that differ in their seeds.

        Empty unless all are there, and of the same data and models.
        """
        found = [record for record in map(self.record, cells) if record is not None]
        same = all(record["settings"] == found[0]["settings"] for record in found)
        return [record["result"] for record in found] if same and len(found) == len(cells) else []


class CellFolder:
    """The folder with the files of a size's cells.

    Args:
        directory: The folder.
        recorded: Records of cells that need no file.

    """

    def __init__(self, directory: Path, recorded: Iterable[Record] = ()) -> None:
        self.directory = directory
        self._recorded = {name_of(record["cell"]): record for record in recorded}

    def read(self, cell: Cell, settings: Mapping[str, Any]) -> Record | None:
        """Return a cell's record with these settings, or None if there is none."""
        file = self._file(described(cell))
        found = [json.loads(file.read_text(encoding="utf-8"))] if file.is_file() else []
        if recorded := self._recorded.get(name_of(described(cell))):
            found.append(recorded)
        # Through JSON, so that tuples equal the lists that were read.
        own = json.loads(json.dumps(dict(settings)))
        return next((record for record in found if record["settings"] == own), None)

    def write(
        self, cell: Cell, settings: Mapping[str, Any], result: Result, seconds: float
    ) -> Record:
        """Write a cell's record, and return it."""
        record: Record = {
            "cell": described(cell),
            "settings": dict(settings),
            "versions": {library: version(library) for library in LIBRARIES},
            "result": result,
            "seconds": round(seconds, 1),
        }
        with replacing(self._file(record["cell"])) as aside:
            aside.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
        return record

    def _file(self, description: Mapping[str, Any]) -> Path:
        return self.directory / f"{name_of(description)}.json"
