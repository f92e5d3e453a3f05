"""Re-run tables and figures of both papers: ``python -m bench.paper NAME … (--small | …)``.

    python -m bench.paper fl-glm-table1 fl-glm-figure5 --small --data DATA --models MODELS
    python -m bench.paper --all --small --data DATA --models MODELS --document docs
    python -m bench.paper --all --small --render --document docs

DATA has the tasks' published files (``docs/tasks.md``): ``superglue/BoolQ/train.jsonl`` and so on.
MODELS has a folder for each base model, named like the last part of its Hugging Face id; models
that are not there come from the hub. With ``--all``, tasks whose files are missing are left out and
are "not run" in the tables.

Every measurement is a file in ``FOLDER/SIZE/cells``. The same command continues where it was
interrupted. Each table is written to ``FOLDER/SIZE`` as Markdown and CSV, and each figure as SVG,
as soon as all of its measurements are there. ``--document`` writes the record of all measurements
and ``reproduction.md`` into a folder, and doesn't repeat what is in the record; with ``--render``
nothing is run, and they are written from the record that is there.
"""

import argparse
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path

from bench.paper.artefact import Artefact
from bench.paper.artefacts import ARTEFACTS
from bench.paper.cells import Cell, CellFolder, Record, Results, SheetsCell, name_of
from bench.paper.measuring import Measuring
from bench.paper.progress import seconds_left
from bench.paper.report import current, read_record, write_record, write_reproduction
from bench.paper.sizes import NAMES, Size, read_size
from bench.paper.sources import SourceError, Sources
from bench.paper.tables import write_document


def main() -> None:
    """Measure what is missing, and write the tables and figures."""
    arguments = _arguments()
    size = _size(arguments)
    chosen = _chosen(arguments)
    if arguments.render:
        _render(arguments, chosen)
        return
    folder = arguments.folder / arguments.size
    cells = _cells_of(chosen, size)
    if arguments.all and not arguments.sheets:
        cells = [cell for cell in cells if not isinstance(cell, SheetsCell)]
    recorded = read_record(arguments.document, arguments.size) if arguments.document else []
    measuring = Measuring(
        size=size,
        sources=Sources(arguments.data, arguments.models, tuple(arguments.sheets)),
        folder=CellFolder(folder / "cells", recorded),
        processes=arguments.processes,
    )
    try:
        if arguments.all:
            cells = _with_data(measuring, cells)
        known = measuring.known(cells)
    except SourceError as error:
        raise SystemExit(str(error)) from error
    try:
        _run(measuring, known, arguments, chosen)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; the same command continues") from None


def _with_data(measuring: Measuring, cells: Sequence[Cell]) -> list[Cell]:
    """Leave out the cells whose data are missing, and say so."""
    missing = measuring.without_data(cells)
    for reason in dict.fromkeys(missing.values()):
        print(f"not run: {reason}", flush=True)
    found = [cell for cell in cells if cell not in missing]
    if not found:
        raise SystemExit("nothing can be run")
    return found


def _run(
    measuring: Measuring,
    known: Mapping[Cell, Record | None],
    arguments: argparse.Namespace,
    chosen: Sequence[Artefact],
) -> None:
    """Measure what is missing, and write what becomes complete."""
    size, folder = _size(arguments), arguments.folder / arguments.size
    records = [record for record in known.values() if record is not None]
    missing = [cell for cell, record in known.items() if record is None]
    print(f"{len(records)} of {len(known)} measurements are known", flush=True)
    write = partial(_write_complete, chosen, size=size, cells=known.keys(), folder=folder)
    done = write(records=records, done=set())
    _record(arguments, records)
    remaining = dict.fromkeys(missing)
    for cell, record in measuring.run(missing):
        records.append(record)
        del remaining[cell]
        left = seconds_left(list(remaining), records, arguments.processes)
        print(
            f"{name_of(record['cell'])}, seed {cell.seed}: {record['seconds']:g} s; "
            f"{len(missing) - len(remaining)} of {len(missing)}, "
            f"about {timedelta(seconds=round(left))} left",
            flush=True,
        )
        done = write(records=records, done=done)
        _record(arguments, [record])


def _record(arguments: argparse.Namespace, records: list[Record]) -> None:
    """Add measurements to the record, and write the document, if they are wanted."""
    if arguments.document and records:
        write_record(arguments.document, arguments.size, records)
        write_reproduction(arguments.document, ARTEFACTS)


def _render(arguments: argparse.Namespace, artefacts: Sequence[Artefact]) -> None:
    """Write what the record has."""
    if arguments.document is None:
        raise SystemExit("--render needs --document, the folder with the record, such as docs")
    size = read_size(arguments.size)
    results = Results(current(read_record(arguments.document, arguments.size), size, artefacts))
    for artefact in artefacts:
        document = artefact.document(size, results)
        write_document(arguments.folder / arguments.size / artefact.name, document)
    write_reproduction(arguments.document, ARTEFACTS)


def _write_complete(
    artefacts: Sequence[Artefact],
    size: Size,
    cells: Collection[Cell],
    folder: Path,
    records: list[Record],
    done: set[str],
) -> set[str]:
    """Write each artefact whose ``cells`` are all known; return the names of all that are."""
    results = Results(records)
    complete = {
        artefact.name: artefact
        for artefact in artefacts
        if all(results.get(cell) is not None for cell in artefact.cells(size) if cell in cells)
    }
    for name in complete.keys() - done:
        write_document(folder / name, complete[name].document(size, results))
        print(f"{folder / name}.md is written", flush=True)
    return done | complete.keys()


def _cells_of(artefacts: Sequence[Artefact], size: Size) -> list[Cell]:
    """Return all cells, those that several artefacts have once."""
    return list(dict.fromkeys(cell for artefact in artefacts for cell in artefact.cells(size)))


def _chosen(arguments: argparse.Namespace) -> list[Artefact]:
    known = {artefact.name: artefact for artefact in ARTEFACTS}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        raise SystemExit(f"there is no {', '.join(unknown)}; there are {', '.join(known)}")
    if bool(arguments.names) == arguments.all:
        raise SystemExit(f"name tables and figures, or --all: {', '.join(known)}")
    return list(ARTEFACTS) if arguments.all else [known[name] for name in arguments.names]


def _size(arguments: argparse.Namespace) -> Size:
    size = read_size(arguments.size)
    return size.model_copy(update={"seeds": arguments.seeds}) if arguments.seeds else size


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as fl-glm-table1")
    parser.add_argument("--all", action="store_true", help="all tables and figures")
    sizes = parser.add_mutually_exclusive_group(required=True)
    for name in NAMES:
        sizes.add_argument(f"--{name}", dest="size", action="store_const", const=name)
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="of the results")
    parser.add_argument("--data", type=Path, help="folder with the tasks' files")
    parser.add_argument("--models", type=Path, help="folder with base models")
    parser.add_argument(
        "--sheets",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="key.json and the filled sheets of a human evaluation, for fedjudge-table5",
    )
    parser.add_argument("--seeds", type=int, help="number of seeds, instead of the size's")
    parser.add_argument(
        "--processes",
        type=int,
        default=_processes(),
        help="measurements at the same time, which share the cores (or the GPU)",
    )
    parser.add_argument("--document", type=Path, help="folder for reproduction.md, such as docs")
    parser.add_argument("--render", action="store_true", help="write documents and run nothing")
    return parser.parse_args()


def _processes() -> int:
    import torch

    return 1 if torch.cuda.is_available() else min(2, len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    # So that the processes that measure end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
