"""Tables and pictures of the attacks, made from the record."""

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.attack.cells import Cell
from chambers.experiment.pages import svg

_BLUE, _RED, _GREY, _GREEN, _PURPLE = "#3f90da", "#bd1f01", "#717581", "#507a2d", "#832db6"
_STYLE = {
    "svg.fonttype": "none",  # text is not converted to paths
    "svg.hashsalt": "pictures",  # equal results yield equal files
    "font.size": 10,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
RECORD = "attack.json"
_ATTACKS = {
    "linear": "decoder, linear",
    "transformer": "decoder, Transformer",
    "optimisation": "optimisation",
    "search": "search",
}
_DECODER_AND_SEARCH = ("transformer", "search")
# Line style of each attack in all panels; lines differ in their markers, too.
_LINES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"color": _BLUE, "marker": "o"},
    "transformer": {"color": _RED, "marker": "s"},
    "optimisation": {"color": _GREEN, "marker": "^"},
    "search": {"color": _PURPLE, "marker": "D"},
    "loss_before": {"color": _BLUE, "marker": "o"},
    "loss_after": {"color": _RED, "marker": "s"},
}
_LOSSES = {"loss_before": "base model", "loss_after": "trained"}
_DEFAULTS = {
    field.name: field.default
    for field in fields(Cell)
    if field.name not in {"data", "attack", "seed"}
}
_READ = ("decoder: ROUGE-1", "decoder: tokens read", "search: tokens read")
Record = dict[str, Any]
CellRecord = dict[str, Any]


def write_results(record: Record, folder: Path) -> None:
    """Write the record, the tables and the pictures into a folder of pages."""
    for name in ("recorded", "pictures"):
        (folder / name).mkdir(exist_ok=True)
    (folder / RECORD).write_text(_one_cell_a_line(record), encoding="utf-8")
    for name, content in (tables(record) | pictures(record)).items():
        (folder / name).write_text(content, encoding="utf-8")


def pictures(record: Record) -> dict[str, str]:
    """Return the pictures as SVG, by file name."""
    made = {"head-blocks": _blocks_picture(record), "noise": _noise_picture(record)}
    return {
        f"pictures/attack-{name}.svg": re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE)
        for name, picture in made.items()
    }


def tables(record: Record) -> dict[str, str]:
    """Return the tables as Markdown, by file name."""
    made = {
        "head-blocks": _by_head_blocks(record),
        "wire-types": _by_wire_type(record),
        "noise": _by_noise(record),
        "network": _on_the_network(record),
        "adapters": _with_adapters(record),
        "gradients": _from_gradients(record),
    }
    return {f"recorded/attack-{name}.md": table for name, table in made.items()}


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |\n" for line in (headings, *rows))
    return "".join([first, "|" + "---|" * len(headings) + "\n", *others])


def _one_cell_a_line(record: Record) -> str:
    """Return the record as JSON with one cell per line, for readable diffs."""
    settings = json.dumps({**record, "cells": []}, indent=1)
    cells = ",\n  ".join(json.dumps(cell) for cell in record["cells"])
    return settings.replace('"cells": []', f'"cells": [\n  {cells}\n ]') + "\n"


def _by_head_blocks(record: Record) -> str:
    """Return the table of attacks by number of head blocks, for all texts."""
    names = list(record["covered"])
    rows = []
    for attack, label in _ATTACKS.items():
        for blocks in _values(record, "head_blocks", attack=attack):
            cells = [_cells(record, attack, data=name, head_blocks=blocks) for name in names]
            rows.append((label, str(blocks), *(score for own in cells for score in _scores(own))))
    headings = (f"{name}: {score}" for name in names for score in ("ROUGE-1", "tokens read"))
    return _table(("attack", "head blocks", *headings), rows)


def _by_wire_type(record: Record) -> str:
    rows = ((wire, *_read(record, wire=wire)) for wire in ("float32", "bfloat16", "int8"))
    return _table(("wire", *_READ), rows)


def _by_noise(record: Record) -> str:
    rows = []
    for noise in _values(record, "noise", attack="loss"):
        cells = _cells(record, "loss", noise=noise)
        losses = (_spread(cells, name, scale=1, digits=3) for name in _LOSSES)
        rows.append((f"{noise:g}", *losses, *_read(record, noise=noise)))
    names = (f"loss, {model}" for model in _LOSSES.values())
    return _table(("`split.noise`", *names, *_READ), rows)


def _on_the_network(record: Record) -> str:
    rows = []
    for seen in ("hidden states", "encrypted records", "nothing"):
        name = "random numbers" if seen == "nothing" else seen
        rows.append((name, *_scores(_cells(record, "transformer", seen=seen))))
    return _table(("the decoder sees", "ROUGE-1", "tokens read"), rows)


def _with_adapters(record: Record) -> str:
    rows = (
        (str(blocks), name, *_read(record, head_blocks=blocks, tuned=tuned))
        for blocks in _values(record, "head_blocks", tuned=True)
        for name, tuned in (("public", False), ("with adapter", True))
    )
    return _table(("head blocks", "client's head", *_READ), rows)


def _from_gradients(record: Record) -> str:
    cells = [cell for cell in record["cells"] if cell["attack"] == "gradient"]
    rows = []
    for tail, wire, noise in sorted({(c["tail_blocks"], c["wire"], c["noise"]) for c in cells}):
        own = _cells(record, "gradient", tail_blocks=tail, wire=wire, noise=noise)
        rows.append((str(tail), wire, f"{noise:g}", _count(own)))
    return _table(("tail blocks", "wire", "`split.noise`", "labels read"), rows)


def _first(record: Record) -> str:
    """Return the name of the texts on which all attacks are run."""
    return str(next(iter(record["covered"])))


def _cells(record: Record, attack: str, **settings: Any) -> list[CellRecord]:
    """Return the cells, one per seed, with these settings and otherwise default settings."""
    wanted = {"data": _first(record), "attack": attack, **_DEFAULTS, **settings}
    return [cell for cell in record["cells"] if wanted.items() <= cell.items()]


def _values(record: Record, name: str, **settings: Any) -> list[Any]:
    """Return all values of a setting among cells on the first texts with the given settings."""
    wanted = {"data": _first(record), **settings}
    return sorted({cell[name] for cell in record["cells"] if wanted.items() <= cell.items()})


def _read(record: Record, **settings: Any) -> tuple[str, str, str]:
    """Return the scores of the Transformer and the search on the first texts, as in ``_READ``."""
    decoder, search = (_cells(record, attack, **settings) for attack in _DECODER_AND_SEARCH)
    return *_scores(decoder), _count(search)


def _scores(cells: Sequence[CellRecord]) -> tuple[str, str]:
    """Return ROUGE-1, and the number of tokens that were read."""
    return _spread(cells, "rouge1"), _count(cells)


def _count(cells: Sequence[CellRecord]) -> str:
    """Return the numbers of tokens (or labels) read and attacked, over all seeds."""
    results = [cell["result"] for cell in cells]
    read = sum(round(result["tokens"] * result["attacked"]) for result in results)
    return f"{read}/{sum(result['attacked'] for result in results)}" if results else "–"


def _spread(cells: Sequence[CellRecord], score: str, scale: float = 100, digits: int = 1) -> str:
    """Format a result's mean and standard deviation over seeds; scores are in percent."""
    if not cells:
        return "–"
    mean, deviation = _statistics(cells, score, scale)
    # A deviation of 0, for example if all tokens were read, is not shown.
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation else "")


def _statistics(cells: Sequence[CellRecord], score: str, scale: float = 100) -> tuple[float, float]:
    values = [scale * cell["result"][score] for cell in cells]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@rc_context(_STYLE)
def _blocks_picture(record: Record) -> str:
    """Return an SVG with ROUGE-1 of each attack by head blocks, one panel per data set."""
    names = list(record["covered"])
    figure = Figure(figsize=(4.5 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, data in zip(panels, names, strict=True):
        for attack, label in _ATTACKS.items():
            blocks = _values(record, "head_blocks", data=data, attack=attack)
            cells = [_cells(record, attack, data=data, head_blocks=number) for number in blocks]
            if cells:
                _draw(panel, blocks, cells, label, _LINES[attack])
        chance = _cells(record, "transformer", data=data, seen="nothing")
        if chance:
            level = statistics.mean(100 * cell["result"]["rouge1"] for cell in chance)
            panel.axhline(level, color=_GREY, linestyle=":", label="chance")
        panel.set(title=data, xlabel="head blocks", ylim=(0, 104))
    panels[0].set_ylabel("ROUGE-1, %")
    panels[0].legend(fontsize="small", loc="upper right", bbox_to_anchor=(1, 0.95), ncols=2)
    return svg(figure)


@rc_context(_STYLE)
def _noise_picture(record: Record) -> str:
    """Return an SVG with ROUGE-1 and held-out loss by noise, side by side."""
    noises = _values(record, "noise", attack="loss")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    scores, losses = figure.subplots(1, 2)
    for attack in _DECODER_AND_SEARCH:
        cells = [_cells(record, attack, noise=noise) for noise in noises]
        _draw(scores, noises, cells, _ATTACKS[attack], _LINES[attack])
    scores.set(ylabel="ROUGE-1, %", ylim=(0, 104))
    for key, label in _LOSSES.items():
        cells = [_cells(record, "loss", noise=noise) for noise in noises]
        _draw(losses, noises, cells, label, _LINES[key], score=key, scale=1)
    losses.set_ylabel("held-out loss, nats per token")
    for panel in (scores, losses):
        panel.set_xscale("symlog", linthresh=0.1)
        panel.set_xlim(-0.01, 1.2 * max(noises))
        panel.set_xlabel("split.noise")
        panel.legend(fontsize="small")
    return svg(figure)


def _draw(
    panel: Any,
    values: Sequence[Any],
    cells: Sequence[list[CellRecord]],
    label: str,
    line: Mapping[str, Any],
    score: str = "rouge1",
    scale: float = 100,
) -> None:
    """Draw the mean and standard deviation of the cells for each value."""
    means, deviations = zip(*(_statistics(each, score, scale) for each in cells), strict=True)
    panel.errorbar(values, means, yerr=deviations, capsize=3, label=label, **line)
