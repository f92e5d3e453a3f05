"""The tables and plots of an experiment: Markdown and SVG."""

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from chambers.experiment.plan import CONSTANT, Experiment, Measure, ResultTable
from chambers.experiment.results import UNITS, Record, TableRow, rows_of
from chambers.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# What a measure has a value for, if not for each question.
_OVER = dict.fromkeys(("distance", "penalty_gradient_share", "membership", "exposure"), "clients")
_OVER |= dict.fromkeys(("facts", "sampled"), "people")


def write_pages(experiment: Experiment, records: Sequence[Record], folder: Path) -> str:
    """Write all tables and plots to a folder; return a page with all tables."""
    parts = [f"# {experiment.title}\n"]
    rows_by_table = {table.name: rows_of(records, experiment, table) for table in experiment.tables}
    for table in experiment.tables:
        rows = rows_by_table[table.name]
        text = _markdown(experiment, table, rows)
        parts.append(f"## {table.title}\n\n{text}")
        (folder / f"{table.name}.md").write_text(text, encoding="utf-8")
    for plot in experiment.plots:
        tables = {table.name: table for table in experiment.tables}
        picture = _draw(plot.name, [(tables[name], rows_by_table[name]) for name in plot.tables])
        (folder / f"{plot.name}.svg").write_text(picture, encoding="utf-8")
    return "\n".join(parts)


def _markdown(experiment: Experiment, table: ResultTable, rows: Sequence[TableRow]) -> str:
    """Return a table of the columns in which a trained model beats a constant answer, if any."""
    constant = next((row.cells for row in rows if row.arm == CONSTANT), {})
    trained = [row for row in rows if row.arm != CONSTANT and experiment.arms[row.arm].trained]
    columns = list(dict.fromkeys(column for row in rows for column in row.cells))
    chance = [
        column
        for column, answer in constant.items()
        if not any(row.cells[column].low > answer.mean for row in trained if column in row.cells)
    ]
    columns = [column for column in columns if column not in chance]
    because = "no trained model was shown to be better than the same answer to every question"
    note = f"Left out, because {because}: {', '.join(chance)}.\n" if chance else ""
    if absent := sorted({*table.arms} - {row.arm for row in rows}):
        note += f"No values were recorded of: {', '.join(absent)}.\n"
    if not columns:
        return note
    gains = [each for each in next((row.gains for row in rows if row.gains), {}) if each in columns]
    heading = ["", *columns]
    for column in gains:
        heading.append(f"{column} − {experiment.arms[table.against or ''].label}")
        if column in table.equal:
            heading.append(f"{column} within ±{table.equal[column]:g}")
    heading += [f"{column}, published" for column in columns if _published(table, column)]
    lines = [_line(heading), _line(["---"] * len(heading))]
    for row in rows:
        cells = [_cell(row.cells.get(column), table.measure) for column in columns]
        for column in gains:
            cells.append(_gain(row.gains.get(column), table.measure))
            if column in table.equal:
                is_equal = row.equal.get(column)
                cells.append("" if is_equal is None else "yes" if is_equal else "not shown")
        name = f"{row.arm} {row.client}" if row.client else row.arm
        for values in filter(None, (_published(table, column) for column in columns)):
            cells.append(f"*{values[name]:g}*" if name in values else "")
        lines.append(_line([row.label, *cells]))
    over = _OVER.get(table.measure.partition("-")[0], "questions")
    seeds = max(len(cell.seeds) for row in rows for cell in row.cells.values())
    over = f"{over} (one seed)" if seeds == 1 else f"{seeds} seeds and {over}"
    about = f"In {UNITS.get(table.measure, '%')}, with 95 % intervals over {over}."
    return "\n".join([about, "", *lines, f"\n{note}" if note else ""])


def _published(table: ResultTable, column: str) -> dict[str, float]:
    """Return the published values of a column, keyed by arm."""
    return {arm: own[column] for arm, own in table.published.items() if column in own}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: float, measure: Measure) -> str:
    text = f"{value:.3f}" if measure in UNITS else f"{100 * value:.0f}"
    return text.replace("-", "−")


def _cell(value: Interval | None, measure: Measure) -> str:
    if value is None:  # an arm with fewer clients
        return ""
    mean, low, high = (_text(each, measure) for each in (value.mean, value.low, value.high))
    return mean if math.isnan(value.low) else f"{mean} ({low} to {high})"


def _gain(gain: Interval | None, measure: Measure) -> str:
    text = _cell(gain, measure)
    return f"**{text}**" if gain and (gain.low > 0 or gain.high < 0) else text


def _draw(name: str, tables: Sequence[tuple[ResultTable, Sequence[TableRow]]]) -> str:
    """Return a picture with a panel for each column of each table, in which rows are models.

    The background is white, so dark pages can show it too.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(r.label for _, rows in tables for r in rows if r.arm != CONSTANT))
    panels = [
        (table, column, rows)
        for table, rows in tables
        for column in dict.fromkeys(column for row in rows for column in row.cells)
    ]
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}):
        figure = Figure((2.5 + 2.8 * len(panels), 1.1 + 0.34 * len(labels)), layout="constrained")
        all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (table, column, rows) in zip(all_axes, panels, strict=True):
            cells = {
                None if row.arm == CONSTANT else labels.index(row.label): row.cells.get(column)
                for row in rows
            }
            _draw_panel(axes, table, column, cells)
        all_axes[0].set_yticks(range(len(labels)), labels)
        all_axes[0].invert_yaxis()
        file = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # so equal figures are equal
        figure.savefig(file, format="svg", facecolor="white", metadata=nothing)
        return file.getvalue()


def _draw_panel(
    axes: "Axes", table: ResultTable, column: str, cells: Mapping[int | None, Interval | None]
) -> None:
    """Draw a column: seeds as dots, the mean as a mark, and its interval as a line.

    ``cells`` are keyed by the number of the row. The score of the same answer to every question,
    with the key None, is a dashed line.
    """
    scale = 1 if table.measure in UNITS else 100
    for y, cell in cells.items():
        if cell is None:  # an arm with fewer clients
            continue
        low, mean, high, *seeds = (scale * x for x in (cell.low, cell.mean, cell.high, *cell.seeds))
        if y is None:
            axes.axvline(mean, color="0.6", linestyle="--", linewidth=1)
            continue
        axes.plot([low, high], [y, y], color="C0", linewidth=1.5)
        axes.plot(mean, y, marker="|", markersize=13, markeredgewidth=2.5, color="C0")
        axes.plot(seeds, [y] * len(seeds), "o", markersize=4, color="black", alpha=0.55)
    axes.set_title(fill(f"{table.title}: {column}", 36), fontsize=9, loc="left")
    axes.set_xlabel(UNITS.get(table.measure, "%"), fontsize=9)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlim(left=0)
