"""The tables and plots of an experiment: Markdown, CSV and SVG."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chambers.experiment.measuring import Record
from chambers.experiment.plan import Experiment, Measure, Plot, Table
from chambers.experiment.results import ALL, Row, rows_of
from chambers.experiment.statistics import Interval
from finetuning.generated.matters import MATTERS

_UNITS = {"article": "% of questions", "answer": "% of questions", "loss": "nats per token"}
_SIZE_OF_CELL = (1.3, 0.5)  # inches


def write_pages(experiment: Experiment, records: Sequence[Record], folder: Path) -> str:
    """Write all tables and plots into a folder; return the page with the tables."""
    parts = [f"# {experiment.title}\n"]
    for table in experiment.tables:
        rows = rows_of(records, experiment, table.measure, table.arms, table.against)
        parts.append(_section(experiment, table, rows))
        (folder / f"{table.name}.csv").write_text(_csv(table, rows), encoding="utf-8")
    for plot in experiment.plots:
        rows = rows_of(records, experiment, plot.measure, plot.arms)
        (folder / f"{plot.name}.svg").write_text(_heat_map(plot, rows), encoding="utf-8")
        parts.append(f"![{plot.title}]({plot.name}.svg)\n")
    page = "\n".join(parts)
    (folder / "tables.md").write_text(page, encoding="utf-8")
    return page


def _constant_predictor(measure: Measure) -> float | None:
    """Return the value of always giving the same answer; None if there is no such value."""
    return 1 / len(MATTERS) if measure == "article" else None


def _section(experiment: Experiment, table: Table, rows: Sequence[Row]) -> str:
    """Return a table with its heading, or a line instead of one that shows nothing."""
    constant = _constant_predictor(table.measure)
    trained = [row for row in rows if experiment.arms[row.arm].trained]
    if constant is not None and all(row.cells[ALL].low <= constant for row in trained):
        return (
            f"## {table.title}\n\nNot compared: no trained model is better than the constant "
            f"predictor ({_text(constant, table.measure)})."
        )
    heading = ["", *rows[0].cells]
    if table.against:
        heading += [f"− {experiment.arms[table.against].label}", "detectable"]
    if table.published:
        heading.append("paper")
    lines = [_line(heading), _line(["---"] * len(heading))]
    for row in rows:
        cells = [_cell(cell, table.measure) for cell in row.cells.values()]
        if table.against:
            cells += _gain(row.gain, table.measure)
        if table.published:
            value = table.published.get(row.arm)
            cells.append("" if value is None else f"*{value:g}*")
        lines.append(_line([row.label, *cells]))
    unit = f"{_UNITS[table.measure]}, with 95 % intervals over seeds and questions"
    return "\n".join([f"## {table.title}", "", unit, "", *lines, ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: float, measure: Measure) -> str:
    text = f"{value:.3f}" if measure == "loss" else f"{100 * value:.0f}"
    return text.replace("-", "−")


def _cell(value: Interval, measure: Measure) -> str:
    low, high = _text(value.low, measure), _text(value.high, measure)
    return f"{_text(value.mean, measure)} ({low} to {high})"


def _gain(gain: Interval | None, measure: Measure) -> list[str]:
    if gain is None:
        return ["", ""]
    text = _cell(gain, measure)
    return [f"**{text}**" if gain.differs else text, _text(gain.detectable, measure)]


def _csv(table: Table, rows: Sequence[Row]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["model", "group", "mean", "low", "high", "gain", "gain_low", "gain_high"])
    for row in rows:
        for group, cell in row.cells.items():
            gain = row.gain if group == ALL else None
            ends = [gain.mean, gain.low, gain.high] if gain else ["", "", ""]
            writer.writerow([row.label, group, cell.mean, cell.low, cell.high, *ends])
    return file.getvalue()


def _heat_map(plot: Plot, rows: Sequence[Row]) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = [group for group in rows[0].cells if group != ALL]
    values = [[row.cells[group].mean for group in groups] for row in rows]
    width, height = _SIZE_OF_CELL
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name, "font.size": 10}):
        figure = Figure((2.5 + width * len(groups), 1.2 + height * len(rows)), layout="constrained")
        axes = figure.subplots()
        colours = "Blues_r" if plot.measure == "loss" else "Blues"
        image = axes.imshow(values, cmap=colours, aspect="auto", vmin=0)
        axes.set_xticks(range(len(groups)), [f"questions of\n{group}" for group in groups])
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{plot.title} ({_UNITS[plot.measure]})", fontsize=10, loc="left")
        _write_values(axes, image, values, plot.measure)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", facecolor="white", metadata=nothing)
    return file.getvalue()


def _write_values(axes: Any, image: Any, values: list[list[float]], measure: Measure) -> None:
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
            text = _text(value, measure)
            axes.text(x, y, text, ha="center", va="center", color="white" if dark else "black")
