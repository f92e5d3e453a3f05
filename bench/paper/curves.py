"""Pictures of scores by round or step."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bench.drawing import BLUE, GREEN, PURPLE, RED, STYLE, svg

# Lines differ in more than their colour.
_LINES: tuple[Mapping[str, Any], ...] = (
    {"color": BLUE, "linestyle": "-", "marker": "o"},
    {"color": RED, "linestyle": "--", "marker": "s"},
    {"color": GREEN, "linestyle": "-.", "marker": "^"},
    {"color": PURPLE, "linestyle": ":", "marker": "D"},
)


@dataclass(frozen=True)
class Panel:
    """A panel of a picture.

    Attributes:
        title: Its title.
        lines: Of each line its points: x, and the values of all seeds there.

    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, Sequence[float]]]]


@rc_context(STYLE)
def curves(rows: Sequence[tuple[str, Sequence[Panel]]], x_label: str) -> str:
    """Return an SVG with means over seeds as lines, and their standard deviations as bands.

    Args:
        rows: Rows of panels, each with the label of its values.
        x_label: What the lines go over.

    """
    most = max(len(panels) for _, panels in rows)
    figure = Figure(figsize=(2.9 * most, 2.5 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), most, squeeze=False, sharex="col")
    labelled: dict[str, Any] = {}
    for line_of_axes, (y_label, panels) in zip(grid, rows, strict=True):
        for axes in line_of_axes[len(panels) :]:
            axes.remove()
        for axes, panel in zip(line_of_axes, panels, strict=False):
            for style, (label, points) in zip(_LINES, panel.lines.items(), strict=False):
                labelled[label] = _draw(axes, points, style)
            axes.set_title(panel.title, fontsize=10)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        line_of_axes[0].set_ylabel(y_label)
    for axes in grid[-1][: len(rows[-1][1])]:
        axes.set_xlabel(x_label)
    figure.legend(
        list(labelled.values()),
        list(labelled),
        loc="outside lower center",
        ncols=len(labelled),
        frameon=False,
    )
    return svg(figure)


def _draw(
    axes: Any, points: Sequence[tuple[float, Sequence[float]]], style: Mapping[str, Any]
) -> Any:
    """Draw a line with its band, and return the line."""
    x = [point for point, _ in points]
    means = [statistics.mean(values) for _, values in points]
    spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for _, v in points]
    (line,) = axes.plot(x, means, markersize=4, fillstyle="none", **style)
    low = [mean - deviation for mean, deviation in zip(means, spread, strict=True)]
    high = [mean + deviation for mean, deviation in zip(means, spread, strict=True)]
    axes.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    return line
