"""``docs/reproduction.md``, made of recorded cells alone."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import continual_table
from bench.paper.artefact import Artefact
from bench.paper.cells import Record, Results, TimeCell, described, name_of
from bench.paper.measuring import settings_of
from bench.paper.sizes import NAMES, Size, read_size
from bench.paper.tables import write_text
from bench.weights import origin

DOCUMENT = "reproduction.md"
_CONTINUAL = "recorded/continual.json"
_CONTINUAL_COMMAND = """\
python -m bench.continual FOLDER --model MODEL --preset presets/tiny.toml \\
  --run-config 'rounds=3 train.local-steps=5 train.accumulation=1 \\
  continual.importance-examples=8' \\
  --record docs/recorded/continual.json"""
_INTRODUCTION = """\
# Tables and figures of both papers, run again

```
python -m bench.paper --all --small --data DATA --models MODELS --document docs
```

This command ([`measurements.md`](measurements.md)) writes the page from `recorded/paper/` and
`recorded/continual.json`.

- Values are means ± standard deviations over seeds. *Values in italics are the paper's.*
  Held-out losses are in nats per token of the right answers.
- **Small models show trends only.** A difference smaller than the deviations shows nothing.
- [`sizes.toml`](../bench/paper/sizes.toml) has the sizes' settings.
"""
_ABOUT = {
    "small": "Small: two cores",
    "medium": "Medium: one GPU",
    "full": "Full: the papers' models and settings",
}


def write_record(docs: Path, size: str, records: Iterable[Record]) -> None:
    """Add cells to those that are recorded of a size; a cell replaces its older result."""
    cells = {name_of(record["cell"]): record for record in read_record(docs, size)}
    cells |= {name_of(record["cell"]): record for record in records}
    lines = (json.dumps(cells[name], ensure_ascii=False) for name in sorted(cells))
    write_text(_record(docs, size), "".join(f"{line}\n" for line in lines))


def read_record(docs: Path, size: str) -> list[Record]:
    """Return the recorded cells of a size; none if it has not been run."""
    file = _record(docs, size)
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def current(records: Sequence[Record], size: Size, artefacts: Sequence[Artefact]) -> list[Record]:
    """Return the records of artefacts' cells that were measured with the size's settings.

    Of each task and model, only those of the same data and weights are returned: of what most have.
    """
    found = {name_of(record["cell"]): record for record in records}
    kept = []
    for cell in dict.fromkeys(cell for artefact in artefacts for cell in artefact.cells(size)):
        record = found.get(name_of(described(cell)))
        # Through JSON, as the record was.
        settings = json.loads(json.dumps(settings_of(cell, size)))
        if record is not None and settings.items() <= record["settings"].items():
            kept.append(record)
    most: dict[str, Counter[str]] = {}
    for record in kept:
        most.setdefault(_subject(record), Counter())[_sources(record)] += 1
    return [r for r in kept if _sources(r) == most[_subject(r)].most_common(1)[0][0]]


def _subject(record: Record) -> str:
    cell = record["cell"]
    return " ".join(str(cell.get(key)) for key in ("kind", "task", "model"))


def _sources(record: Record) -> str:
    """Return the digests of what a record was measured with."""
    digests = {key: record["settings"].get(key) for key in ("model", "encoder digest", "data")}
    return json.dumps(digests, sort_keys=True)


def write_reproduction(docs: Path, artefacts: Sequence[Artefact]) -> None:
    """Write the document and its pictures from what is recorded."""
    text, pictures = reproduction(docs, artefacts)
    write_text(docs / DOCUMENT, text)
    for name, svg in pictures.items():
        write_text(docs / name, svg)


def reproduction(docs: Path, artefacts: Sequence[Artefact]) -> tuple[str, Mapping[str, str]]:
    """Return the document, and its pictures by their path under its folder.

    Args:
        docs: Folder with the records.
        artefacts: Tables and figures in their order.

    """
    parts = [_INTRODUCTION]
    pictures: dict[str, str] = {}
    for name in NAMES:
        parts.append(f"## {_ABOUT[name]}\n")
        records = read_record(docs, name)
        if not records:
            parts.append(f"Not run yet: `python -m bench.paper --all --{name}`.\n")
            continue
        size, folder = read_size(name), f"pictures/paper/{name}/"
        records = current(records, size, artefacts)
        results = Results(records)
        parts.append(_summary(size, records))
        for artefact in artefacts:
            document = artefact.document(size, results)
            parts.append(_section(artefact, name, size, results))
            parts.append(document.markdown(folder))
            pictures |= {f"{folder}{key}.svg": svg for key, svg in document.figures.items()}
    parts.append(_continual(docs / _CONTINUAL))
    return "\n".join(parts), pictures


def _section(artefact: Artefact, size_name: str, size: Size, results: Results) -> str:
    """Return an artefact's heading, its command, and what was run for it."""
    cells = artefact.cells(size)
    found = [record for record in map(results.record, cells) if record is not None]
    minutes = sum(record["seconds"] for record in found) / 60
    parts = [f"`python -m bench.paper {artefact.name} --{size_name}`"]
    if cells:
        parts.append(f"{len(found)} of {len(cells)} measurements")
    if found:
        parts.append(f"{minutes:.0f} min")
    return f"### {artefact.title}\n\n{', '.join(parts)}.\n"


def _summary(size: Size, records: Sequence[Record]) -> str:
    """Return what all cells of a size have in common."""
    models = ", ".join(dict.fromkeys(size.models.model_dump().values()))
    versions = Counter(_versions(record["versions"]) for record in records)
    digests = {
        value
        for record in records
        for value in (record["settings"].get(key) for key in ("model", "encoder digest"))
        if value
    }
    parts = [
        f"{len(records)} measurements, {_duration(records)}; {size.seeds} seeds. Models: {models}.",
        origin(digests),
        f"Versions: {'; or '.join(v for v, _ in versions.most_common())}.",
    ]
    return " ".join(part for part in parts if part) + "\n"


def _duration(records: Sequence[Record]) -> str:
    """Return how long the measurements took, added up and with two at a time."""
    alone, together = 0.0, 0.0
    for record in records:
        if record["cell"]["kind"] == TimeCell.kind:  # nothing runs beside it
            alone += record["seconds"]
        else:
            together += record["seconds"]
    hours, of_two = (alone + together) / 3600, (alone + together / 2) / 3600
    return f"{hours:.1f} process-hours (with two processes {of_two:.1f} hours, without their start)"


def _versions(versions: Mapping[str, Any]) -> str:
    return ", ".join(f"{library} {number}" for library, number in versions.items())


def _continual(file: Path) -> str:
    """Return the comparison of FedJudge-CL with FedJudge-Base, which has a command of its own."""
    heading = f"## FedJudge-CL against FedJudge-Base\n\n```\n{_CONTINUAL_COMMAND}\n```\n"
    if not file.is_file():
        return f"{heading}\nNot run yet.\n"
    record = json.loads(file.read_text(encoding="utf-8"))
    return f"{heading}\n{continual_table.document(record)}"


def _record(docs: Path, size: str) -> Path:
    return docs / "recorded" / "paper" / f"{size}.jsonl"
