"""Common parts of all pictures: colours, matplotlib settings, and SVG output."""

import io
import re

from matplotlib.figure import Figure

BLUE, RED, GREY, GREEN, PURPLE = "#3f90da", "#bd1f01", "#717581", "#507a2d", "#832db6"
STYLE = {
    "svg.fonttype": "none",  # text is not converted to paths
    "svg.hashsalt": "pictures",  # equal results yield equal files
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def svg(figure: Figure) -> str:
    """Return a figure as SVG on a white background, which is readable on dark pages too."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", facecolor="white", metadata=nothing)
    return re.sub(r"[ \t]+$", "", file.getvalue(), flags=re.MULTILINE)
