"""The tables and figures of FL-GLM, made of results."""

from dataclasses import replace

from bench.paper import fl_glm_cells as cells
from bench.paper.artefact import Artefact
from bench.paper.cells import Results, TaskCell, TimeCell
from bench.paper.fl_glm_comparisons import split_scores, table1, table2, table5, table6
from bench.paper.fl_glm_figures import figure5, figures6to8
from bench.paper.fl_glm_values import (
    ADAPTERS,
    BARE,
    MAIN,
    MAJORITY,
    NAMES,
    PAPERS_MODEL,
    ROUGE,
    SERVER_STEPS,
    base_model,
    loss,
    losses_lowered,
    metrics,
    percent,
    rows_and_questions,
    with_clients,
)
from bench.paper.published import published
from bench.paper.sizes import Size
from bench.paper.tables import Document, Table, Value

# The averaging periods in the paper, in steps.
_PERIODS = (50, 100)


def table3(size: Size, results: Results) -> Document:
    """Return how long training takes, and its ratio to centralised training."""
    paper, timed = published("fl-glm-table3"), cells.timed(size)
    count = size.fl_glm.time.repetitions
    seconds = {
        row: [result["seconds"] for result in results.of_seeds(_repeated(cell, count))]
        for row, cell in timed.items()
    }
    base, rows = seconds["centralised"], []
    base_of_paper = paper.figure("centralised", "seconds")
    for row, own in seconds.items():
        known = row in paper.rows
        mean = paper.figure(row, "seconds") if known else None
        deviation = paper.figure(row, "standard deviation") if known else None
        ratios = [a / b for a, b in zip(own, base, strict=True)] if own and base else []
        ratio = round(mean / base_of_paper, 2) if mean and base_of_paper else None
        values = [Value(own, mean, published_deviation=deviation), Value(ratios, ratio)]
        rows.append(([row], values))
    adapter = size.fl_glm.time.adapter
    place = "" if adapter == "prefix" else ", where the paper has P-tuning v2"
    notes = [
        f"Model: {_timed_model(size)}. Adapter: {ADAPTERS[adapter]}{place}.",
        f"{size.fl_glm.time.rows} rows of ReCoRD with batch size 1, {count} repetitions. Without "
        "a GPU all parties share one core.",
        paper.note,
    ]
    columns = ["", "seconds", "÷ centralised"]
    return Document([Table("Duration of training", columns, rows, notes, digits=2)])


def _timed_model(size: Size) -> str:
    name = size.fl_glm.time.model
    return "`tiny`, with a million weights" if name == "tiny" else name


def table4(size: Size, results: Results) -> Document:
    """Return what decoders read from hidden states."""
    paper = published("fl-glm-table4")
    keys = {**ROUGE, "BLEU-4": "bleu4"}
    rows = []
    for row in cells.ATTACKS:
        found = results.of_seeds(cells.attacks(size, row))
        values = [
            Value([100 * result[key] for result in found], paper.figure(row, column))
            for column, key in keys.items()
        ]
        rows.append(([row], values))
    notes = [
        base_model(size.models.english),
        "On BoolQ. [`attack.md`](attack.md) has more attacks.",
    ]
    title = "Text that a decoder reads from a client's hidden states"
    return Document([Table(title, ["", *keys], rows, notes)])


def table8(size: Size, results: Results) -> Document:
    """Return scores by averaging period and schedule, and the held-out losses."""
    own, labels = size.fl_glm, ["task", "period"]
    how = f"{with_clients(size)}, {ADAPTERS[own.period_adapter]}"
    periods = " and ".join(str(period) for period in sorted(own.periods))
    notes = [
        f"{base_model(size.models.english)} {PAPERS_MODEL}",
        f"Periods of {periods} steps stand for the paper's {' and '.join(map(str, _PERIODS))}. "
        "MultiRC: F1a; others: accuracy.",
        SERVER_STEPS,
        published("fl-glm-table8").note,
    ]
    scores = Table(
        f"Scores by averaging period, {how}",
        [*labels, BARE, MAJORITY, *cells.SCHEDULES],
        [_scores_of_period(size, results, *row) for row in _rows_of_periods(size)],
        notes,
    )
    trained = [
        cell
        for task, period, _ in _rows_of_periods(size)
        for method in cells.SCHEDULES
        for cell in cells.split(size, task, method, period=period)
    ]
    losses = Table(
        f"Held-out loss by averaging period, {how}",
        [*labels, BARE, *cells.SCHEDULES],
        [
            _losses_of_period(size, results, task, period)
            for task, period, _ in _rows_of_periods(size)
        ],
        losses_lowered(results, trained),
        digits=3,
    )
    by_task: dict[str, list[TaskCell]] = {}
    for cell in trained:
        by_task.setdefault(cell.task, []).append(cell)
    return Document(
        [scores, losses, rows_and_questions(size, results, by_task, own.period_adapter)]
    )


def _rows_of_periods(size: Size) -> list[tuple[str, int, int]]:
    """Return the rows of table 8: task, period, and the period in the paper."""
    periods = list(zip(sorted(size.fl_glm.periods), _PERIODS, strict=True))
    return [(task, own, theirs) for task in size.fl_glm.period_tasks for own, theirs in periods]


def _scores_of_period(
    size: Size, results: Results, task: str, period: int, in_paper: int
) -> tuple[list[str], list[Value]]:
    paper, row = published("fl-glm-table8"), f"{NAMES[task]}, {in_paper}"
    metric = MAIN.get(task, "accuracy")
    bare = results.of_seeds([cells.bare(task, size.models.english)])
    values = [
        Value(percent([result[key] for result in bare], metric)) for key in ("metrics", "majority")
    ]
    for method in cells.SCHEDULES:
        tuned = cells.split(size, task, method, period=period)
        own = percent(metrics(results, tuned), metric)
        values.append(Value(own, paper.figure(row, method)))
    return [NAMES[task], str(period)], values


def _losses_of_period(
    size: Size, results: Results, task: str, period: int
) -> tuple[list[str], list[Value]]:
    compared: list[list[TaskCell]] = [[cells.bare(task, size.models.english)]]
    compared += [cells.split(size, task, method, period=period) for method in cells.SCHEDULES]
    return [NAMES[task], str(period)], [Value(loss(results, own)) for own in compared]


def _repeated(cell: TimeCell, count: int) -> list[TimeCell]:
    return [replace(cell, seed=number) for number in range(count)]


ARTEFACTS = (
    Artefact("fl-glm-table1", "FL-GLM, table 1: SuperGLUE", cells.table1, table1),
    Artefact("fl-glm-table2", "FL-GLM, table 2: summaries", cells.table2, table2),
    Artefact("fl-glm-table3", "FL-GLM, table 3: training time", cells.table3, table3),
    Artefact("fl-glm-table4", "FL-GLM, table 4: security analysis", cells.table4, table4),
    Artefact("fl-glm-table5", "FL-GLM, table 5: another base model", cells.table5, table5),
    Artefact("fl-glm-table6", "FL-GLM, table 6: medical answers", cells.table6, table6),
    Artefact("fl-glm-table8", "FL-GLM, table 8: averaging period", cells.table8, table8),
    Artefact("fl-glm-figure5", "FL-GLM, figure 5: IID and non-IID rows", cells.figure5, figure5),
    Artefact(
        "fl-glm-figures6-8",
        "FL-GLM, figures 6 to 8: number of clients",
        cells.figures6to8,
        figures6to8,
    ),
    Artefact(
        "fl-glm-split-scores",
        "FL-GLM: a split model's scores",
        cells.split_scores,
        split_scores,
    ),
)
