"""Measure cells of all kinds, several at the same time."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from bench.paper import task_settings
from bench.paper.cells import (
    AttackCell,
    Cell,
    CellFolder,
    LegalCell,
    Record,
    Result,
    SheetsCell,
    SplitCell,
    TaskCell,
    TimeCell,
)
from bench.paper.legal import CLIENTS
from bench.paper.sizes import Size
from bench.paper.sources import MissingDataError, Sources
from bench.pool import pool


def settings_of(cell: Cell, size: Size) -> dict[str, Any]:
    """Return the settings that a cell's result depends on, without what `inputs_of` has."""
    match cell:
        case TaskCell():
            return task_settings.settings_of(cell, size)
        case SplitCell():
            from bench.paper import split_scores

            return split_scores.settings_of(cell, size)
        case TimeCell():
            from bench.paper import training_times

            return training_times.settings_of(size)
        case AttackCell():
            from bench.paper import attacks

            return attacks.settings_of(size)
        case LegalCell():
            from bench.paper import legal_training

            return legal_training.settings_of(cell, size)
        case SheetsCell():
            return {}
    raise TypeError(f"unknown kind of cell: {cell}")


def inputs_of(cell: Cell, size: Size, sources: Sources) -> dict[str, Any]:
    """Return digests of the data and models that a cell's result depends on.

    Raises:
        SourceError: Data or a model is missing.

    """
    match cell:
        case TaskCell() | SplitCell():
            return _digests(sources, cell.task, cell.model)
        case TimeCell():
            from bench.paper import training_times

            return {
                **_digests(sources, training_times.TASK, size.fl_glm.time.model),
                "machine": training_times.machine(),
            }
        case AttackCell():
            from bench.paper import attacks

            return _digests(sources, attacks.TASK, cell.model)
        case LegalCell():
            from bench.paper import legal_scoring

            return {
                "data": {client: sources.data_digest(client) for client in CLIENTS},
                "model": sources.model_digest(cell.model),
                "encoder digest": legal_scoring.encoder_digest(size.fedjudge, sources),
            }
        case SheetsCell():
            from bench.paper import filled_sheets

            return {"sheets": filled_sheets.digests(sources)}
    raise TypeError(f"unknown kind of cell: {cell}")


def _digests(sources: Sources, task: str, model: str) -> dict[str, Any]:
    return {"data": sources.data_digest(task), "model": sources.model_digest(model)}


def measure(cell: Cell, size: Size, sources: Sources) -> Result:
    """Measure a cell."""
    match cell:
        case TaskCell():
            from bench.paper import task_training

            return task_training.measure(cell, size, sources)
        case SplitCell():
            from bench.paper import split_scores

            return split_scores.measure(cell, size, sources)
        case TimeCell():
            from bench.paper import training_times

            return training_times.measure(cell, size, sources)
        case AttackCell():
            from bench.paper import attacks

            return attacks.measure(cell, size, sources)
        case LegalCell():
            from bench.paper import legal_training

            return legal_training.measure(cell, size, sources)
        case SheetsCell():
            from bench.paper import filled_sheets

            return filled_sheets.measure(sources)
    raise TypeError(f"unknown kind of cell: {cell}")


def needs_quiet(cell: Cell) -> bool:
    """Return whether nothing else may run while a cell is measured: it is a duration."""
    return isinstance(cell, TimeCell)


class Measuring:
    """Measures cells at a size, and keeps their results.

    Args:
        size: The size.
        sources: Where models and data are.
        folder: Where results are kept.
        processes: Number of cells measured at the same time.

    """

    def __init__(self, size: Size, sources: Sources, folder: CellFolder, processes: int) -> None:
        self._size = size
        self._sources = sources
        self._folder = folder
        self._processes = processes

    def without_data(self, cells: Sequence[Cell]) -> dict[Cell, str]:
        """Return the cells of tasks whose files are missing, and what is missing.

        Raises:
            SourceError: There is no data at all, or a model is missing.

        """
        reasons = {}
        for cell in cells:
            try:
                inputs_of(cell, self._size, self._sources)
            except MissingDataError as error:
                reasons[cell] = str(error)
        return reasons

    def known(self, cells: Sequence[Cell]) -> dict[Cell, Record | None]:
        """Return each cell's record, or None if it has to be measured.

        Raises:
            SourceError: Data is missing.
            BaseModelError: A model is missing.

        """
        found = [_all_settings(cell, self._size, self._sources) for cell in cells]
        return {cell: self._folder.read(cell, own) for cell, own in zip(cells, found, strict=True)}

    def run(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Record]]:
        """Measure cells, and yield each as soon as its file is written."""
        together = [cell for cell in cells if not needs_quiet(cell)]
        alone = [cell for cell in cells if needs_quiet(cell)]
        for group, processes in ((together, self._processes), (alone, 1)):
            if group:
                yield from self._run(group, processes)

    def _run(self, cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, Record]]:
        with pool(processes) as executor:
            waiting: dict[Future[Record], Cell] = {}
            remaining = list(cells)
            while remaining or waiting:
                while remaining and len(waiting) < processes:
                    cell = remaining.pop(0)
                    work = (cell, self._size, self._sources, self._folder)
                    waiting[executor.submit(_measured, *work)] = cell
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    cell = waiting.pop(done)
                    try:
                        yield cell, done.result()
                    except Exception as error:
                        error.add_note(f"while measuring {cell}")
                        raise


def _all_settings(cell: Cell, size: Size, sources: Sources) -> dict[str, Any]:
    return settings_of(cell, size) | inputs_of(cell, size, sources)


def _measured(cell: Cell, size: Size, sources: Sources, folder: CellFolder) -> Record:
    settings = _all_settings(cell, size, sources)
    started = time.perf_counter()
    result = measure(cell, size, sources)
    return folder.write(cell, settings, result, time.perf_counter() - started)
