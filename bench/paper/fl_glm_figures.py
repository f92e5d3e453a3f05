"""FL-GLM's figures: 5, and 6 to 8."""

from collections.abc import Mapping, Sequence

from bench.paper import fl_glm_cells as cells
from bench.paper.cells import Results, TaskCell
from bench.paper.curves import Panel, curves
from bench.paper.fl_glm_values import (
    ADAPTERS,
    MAIN,
    NAMES,
    base_model,
    metrics,
    percent,
    with_clients,
)
from bench.paper.sizes import Size
from bench.paper.tables import Document, Table, Value

_X = "rows trained on, of all clients"


def figure5(size: Size, results: Results) -> Document:
    """Return COPA's accuracy if rows are divided evenly, and by their labels."""
    kinds = {"IID": False, "by label": True}
    bare = results.get(cells.bare(cells.DIVIDED, size.models.english))
    rows, panels = [], []
    for method in cells.SCHEDULES:
        found = {
            name: cells.split(size, cells.DIVIDED, method, by_label=by_label)
            for name, by_label in kinds.items()
        }
        values = [Value(percent(metrics(results, own), "accuracy")) for own in found.values()]
        rows.append(([method], values))
        lines = {name: _curve(results, own, bare) for name, own in found.items()}
        panels.append(Panel(method, {name: line for name, line in lines.items() if line}))
    title = f"COPA's accuracy, {with_clients(size)}"
    notes = [
        _about_model(size),
        "By label: each client has the rows of one label. In the paper, serial and hierarchical "
        "training lose about 7 points by that, and client-batch training hardly any.",
    ]
    figures = {}
    if all(panel.lines for panel in panels):
        figures["fl-glm-figure5"] = curves([("accuracy, %", panels)], _X)
    return Document([Table(title, ["", *kinds], rows, notes)], figures)


def figures6to8(size: Size, results: Results) -> Document:
    """Return scores by the number of clients, for each schedule."""
    tables: list[Table] = []
    figures: dict[str, str] = {}
    for number, method in enumerate(cells.SCHEDULES, start=6):
        rows, panels = [], []
        for task in size.fl_glm.curves:
            bare = results.get(cells.bare(task, size.models.english))
            metric = MAIN.get(task, "accuracy")
            found = {
                clients: cells.split(size, task, method, clients=clients)
                for clients in size.fl_glm.clients
            }
            values = [Value(percent(metrics(results, own), metric)) for own in found.values()]
            rows.append(([NAMES[task]], values))
            lines = {
                f"{clients} clients": _curve(results, own, bare, metric)
                for clients, own in found.items()
            }
            panels.append(Panel(NAMES[task], {name: line for name, line in lines.items() if line}))
        headings = ["", *(f"{clients} clients" for clients in size.fl_glm.clients)]
        title = f"Figure {number}: {method}"
        tables.append(Table(title, headings, rows, [] if figures else [_about_model(size)]))
        if all(panel.lines for panel in panels):
            figures[f"fl-glm-figure{number}"] = curves([("score, %", panels)], _X)
    return Document(tables, figures)


def _about_model(size: Size) -> str:
    """Return what all figures have in common."""
    adapter = ADAPTERS[size.fl_glm.period_adapter]
    return f"{base_model(size.models.english)} Adapter: {adapter}. Rows and questions: table 8's."


def _curve(
    results: Results,
    of_seeds: Sequence[TaskCell],
    bare: Mapping[str, dict[str, float]] | None,
    metric: str = "accuracy",
) -> list[tuple[float, list[float]]]:
    """Return a score by rows trained on, of all seeds; empty unless all are there."""
    found = results.of_seeds(of_seeds)
    if not found or bare is None:
        return []
    points = [[*result["curve"], [result["rows"], result["metrics"]]] for result in found]
    return [
        (0.0, [100 * bare["metrics"][metric]]),
        *(
            (own[0][0], [100 * scores[metric] for _, scores in own])
            for own in zip(*points, strict=True)
        ),
    ]
