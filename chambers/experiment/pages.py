"""The tables and plots of an experiment: Markdown and SVG."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import numpy as np

from chambers.experiment.plan import Experiment, Measure, Reported, ResultTable
from chambers.experiment.results import ALL, CONSTANT, Interval, Record, TableRow, rows_of

_UNITS = {"loss": "nats per token", "distance": "the Euclidean norm of adapter weights"}


def write_pages(experiment: Experiment, records: Sequence[Record], folder: Path) -> str:
    """Write all tables and heat maps to a folder; return a page with all tables."""
    parts = [f"# {experiment.title}\n"]
    for table in experiment.tables:
        rows = rows_of(records, experiment, table)
        text = _markdown(experiment, table, rows)
        parts.append(f"## {table.title}\n\n{text}")
        (folder / f"{table.name}.md").write_text(text, encoding="utf-8")
        if table.heat_map:
            rows = rows_of(records, experiment, table.model_copy(update={"columns": "groups"}))
            picture = _heat_map(table, [row for row in rows if row.arm != CONSTANT])
            (folder / f"{table.name}.svg").write_text(picture, encoding="utf-8")
    return "\n".join(parts)


def _markdown(experiment: Experiment, table: ResultTable, rows: Sequence[TableRow]) -> str:
    """Return a table of the columns in which a trained model beats a constant answer, if any."""
    constant = next((row.cells for row in rows if row.arm == CONSTANT), {})
    trained = [row for row in rows if row.arm != CONSTANT and experiment.arms[row.arm].trained]
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    chance = [
        column
        for column, answer in constant.items()
        if all(row.cells[column].low <= answer.mean for row in trained if column in row.cells)
    ]
    columns = [column for column in columns if column not in chance]
    because = "no trained model was shown to be better than the same answer to every question"
    note = f"Left out, because {because}: {', '.join(chance)}.\n" if chance else ""
    if not columns:
        return note
    gains = [each for each in next((row.gains for row in rows if row.gains), {}) if each in columns]
    heading = ["", *columns]
    for column in gains:
        heading += [
            f"{column} − {experiment.arms[table.against or ''].label}",
            "detectable, estimated",
        ]
    heading += [f"{column}, published" for column in columns if _published(table, column)]
    lines = [_line(heading), _line(["---"] * len(heading))]
    for row in rows:
        cells = [_cell(row.cells.get(column), table.measure) for column in columns]
        for column in gains:
            cells += _gain(row.gains.get(column), table.measure)
        name = f"{row.arm} {row.client}" if row.client else row.arm
        for values in filter(None, (_published(table, column) for column in columns)):
            cells.append(f"*{values[name]:g}*" if name in values else "")
        lines.append(_line([row.label, *cells]))
    over = "clients" if table.measure in get_args(Reported) else "questions"
    about = f"In {_UNITS.get(table.measure, '%')}, with 95 % intervals over seeds and {over}."
    return "\n".join([about, "", *lines, f"\n{note}" if note else ""])


def _published(table: ResultTable, column: str) -> dict[str, float]:
    """Return the published values of a column, keyed by arm."""
    return {arm: own[column] for arm, own in table.published.items() if column in own}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: float, measure: Measure) -> str:
    text = f"{value:.3f}" if measure in _UNITS else f"{100 * value:.0f}"
    return text.replace("-", "−")


def _cell(value: Interval | None, measure: Measure) -> str:
    if value is None:  # an arm with fewer clients
        return ""
    low, high = _text(value.low, measure), _text(value.high, measure)
    return f"{_text(value.mean, measure)} ({low} to {high})"


def _gain(gain: Interval | None, measure: Measure) -> list[str]:
    if gain is None:
        return ["", ""]
    text, detectable = _cell(gain, measure), _text(gain.detectable, measure)
    return [text if gain.low <= 0 <= gain.high else f"**{text}**", detectable]


def _heat_map(table: ResultTable, rows: Sequence[TableRow]) -> str:
    """Return a picture on a white background, which is readable on dark pages too."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = [group for group in rows[0].cells if group != ALL]
    values = np.array([[row.cells[group].mean for group in groups] for row in rows])
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": table.name, "font.size": 10}):
        figure = Figure((2.5 + 1.3 * len(groups), 1.2 + 0.5 * len(rows)), layout="constrained")
        axes = figure.subplots()
        colours = "Blues_r" if table.measure == "loss" else "Blues"
        image = axes.imshow(values, cmap=colours, aspect="auto", vmin=0)
        axes.set_xticks(range(len(groups)), [f"questions of\n{group}" for group in groups])
        axes.set_yticks(range(len(rows)), [row.label for row in rows])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"{table.title} ({_UNITS.get(table.measure, '%')})", fontsize=10, loc="left")
        for (y, x), value in np.ndenumerate(values):
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
            axes.text(x, y, _text(value, table.measure), ha="center", va="center", color=colour)
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # so equal figures are equal
        figure.savefig(file, format="svg", facecolor="white", metadata=nothing)
        return file.getvalue()
