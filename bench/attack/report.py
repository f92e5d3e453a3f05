"""The document of the attack, made of its record alone."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.attack.wording import ADAPTER, GRADIENTS, INTRODUCTION, NOISE, SEALED, WIRE
from bench.drawing import BLUE, GREEN, GREY, PURPLE, RED, STYLE, svg
from bench.markdown import table
from bench.paper.published import published
from bench.weights import origin

RECORD = "attack.json"
DOCUMENT = "attack.md"
_BLOCKS_PICTURE = "pictures/attack-head-blocks.svg"
_NOISE_PICTURE = "pictures/attack-noise.svg"
_SCORES = {
    "rouge1": "ROUGE-1",
    "rouge2": "ROUGE-2",
    "rougeL": "ROUGE-L",
    "bleu4": "BLEU-4",
    "tokens": "tokens",
}
_ATTACKS = {
    "linear": "decoder, linear",
    "transformer": "decoder, Transformer",
    "optimisation": "optimisation",
    "search": "search",
    "gradient": "labels from gradients",
}
# Of an attack in all panels, whichever it is in; lines differ in more than their colour.
_LINES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"color": BLUE, "marker": "o"},
    "transformer": {"color": RED, "marker": "s"},
    "optimisation": {"color": GREEN, "marker": "^"},
    "search": {"color": PURPLE, "marker": "D"},
    "loss_before": {"color": BLUE, "marker": "o"},
    "loss_after": {"color": RED, "marker": "s"},
}
_LOSSES = {"loss_before": "base model", "loss_after": "trained"}
_DEFAULTS = {
    "head_blocks": 1,
    "tail_blocks": 1,
    "wire": "bfloat16",
    "noise": 0.0,
    "seen": "hidden states",
    "tuned": False,
}
# Rows of FL-GLM's table 4, by head blocks.
_PAPER = {0: "embedding alone, linear decoder", 1: "one block, Transformer decoder"}
Record = dict[str, Any]
CellRecord = dict[str, Any]


def write_document(record: Record, folder: Path) -> None:
    """Write the record, the document and its pictures into a folder."""
    (folder / "pictures").mkdir(exist_ok=True)
    (folder / RECORD).write_text(_one_cell_a_line(record), encoding="utf-8")
    (folder / DOCUMENT).write_text(markdown(record), encoding="utf-8")
    for name, picture in pictures(record).items():
        (folder / name).write_text(picture, encoding="utf-8")


def pictures(record: Record) -> dict[str, str]:
    """Return the document's pictures as SVG, by the names of their files."""
    return {_BLOCKS_PICTURE: _blocks_picture(record), _NOISE_PICTURE: _noise_picture(record)}


def markdown(record: Record) -> str:
    """Return the document."""
    sizes = record["sizes"]
    first, *_ = record["covered"]
    seeds = 1 + max(cell["seed"] for cell in record["cells"])
    minutes = sum(cell["seconds"] for cell in record["cells"]) / 60
    covered = ", ".join(f"{name} {share:.0%}" for name, share in record["covered"].items())
    return "\n".join(
        [
            INTRODUCTION.format(
                model=record["model"],
                blocks=record["blocks"],
                hidden=record["hidden"],
                vocabulary=f"{record['vocabulary']:,}",
                versions=", ".join(f"{name} {v}" for name, v in record["versions"].items()),
                seeds=seeds,
                minutes=f"{minutes:.0f}",
                covered=covered,
                weights=origin([record["model digest"]]),
                **sizes,
            ),
            *(line for name in record["covered"] for line in _by_head_blocks(record, name)),
            f"![ROUGE-1 by number of head blocks]({_BLOCKS_PICTURE})\n",
            WIRE,
            *table(
                ("wire", "attack", *_SCORES.values()),
                (
                    (wire, _ATTACKS[attack], *_scores(record, first, attack, wire=wire))
                    for wire in ("float32", "bfloat16", "int8")
                    for attack in ("transformer", "search")
                ),
            ),
            NOISE.format(**sizes),
            *_noise_table(record, first),
            f"![ROUGE-1 and held-out loss by noise]({_NOISE_PICTURE})\n",
            SEALED,
            *table(
                ("the decoder sees", *_SCORES.values()),
                (
                    (seen, *_scores(record, first, "transformer", seen=seen))
                    for seen in ("hidden states", "encrypted records", "nothing")
                ),
            ),
            ADAPTER.format(**sizes),
            *table(
                ("head blocks", "client's head", "attack", *_SCORES.values()),
                (
                    (
                        str(blocks),
                        "with its adapter" if tuned else "public",
                        _ATTACKS[attack],
                        *_scores(record, first, attack, head_blocks=blocks, tuned=tuned),
                    )
                    for blocks in _values(record, first, "head_blocks", tuned=True)
                    for attack in ("transformer", "search")
                    for tuned in (False, True)
                ),
            ),
            GRADIENTS.format(**sizes),
            *table(
                ("tail blocks", "wire", "`split.noise`", *_SCORES.values()),
                (
                    (
                        str(tail),
                        wire,
                        f"{noise:g}",
                        *_scores(
                            record, first, "gradient", tail_blocks=tail, wire=wire, noise=noise
                        ),
                    )
                    for tail, wire, noise in sorted(
                        {
                            (cell["tail_blocks"], cell["wire"], cell["noise"])
                            for cell in record["cells"]
                            if cell["attack"] == "gradient"
                        }
                    )
                ),
            ),
        ]
    )


def _one_cell_a_line(record: Record) -> str:
    """Return the record as JSON whose lines can be compared."""
    settings = json.dumps({**record, "cells": []}, indent=1)
    cells = ",\n  ".join(json.dumps(cell) for cell in record["cells"])
    return settings.replace('"cells": []', f'"cells": [\n  {cells}\n ]') + "\n"


def _by_head_blocks(record: Record, data: str) -> list[str]:
    """Return the table of all attacks that depend on the number of head blocks."""
    rows: list[tuple[str, ...]] = []
    for attack in ("linear", "transformer", "optimisation", "search"):
        for blocks in _values(record, data, "head_blocks", attack=attack):
            scores = _scores(record, data, attack, head_blocks=blocks)
            rows.append((_ATTACKS[attack], str(blocks) if blocks else "0 (embedding)", *scores))
    for blocks, row in _PAPER.items():
        kind = "linear" if blocks == 0 else "Transformer"
        figures = (str(figure) for figure in published("fl-glm-table4").rows[row])
        rows.append((f"*the paper's, {kind}*", str(blocks), *figures, "–"))
    headings = ("attack", "head blocks", *_SCORES.values())
    return [f"Texts: {data}.\n", *table(headings, rows)]


def _noise_table(record: Record, data: str) -> list[str]:
    rows = []
    for noise in _values(record, data, "noise", attack="loss"):
        losses = _cells(record, data, "loss", noise=noise)
        rows.append(
            (
                f"{noise:g}",
                *(_spread(losses, name, scale=1, digits=3) for name in _LOSSES),
                *(
                    _spread(_cells(record, data, attack, noise=noise), score)
                    for attack in ("transformer", "search")
                    for score in ("rouge1", "bleu4", "tokens")
                ),
            )
        )
    names = ("ROUGE-1", "BLEU-4", "tokens")
    headings = (
        *("`split.noise`", *(f"loss, {model}" for model in _LOSSES.values())),
        *(f"{attack}: {name}" for attack in ("decoder", "search") for name in names),
    )
    return table(headings, rows)


def _cells(record: Record, data: str, attack: str, **settings: Any) -> list[CellRecord]:
    """Return the cells, one per seed, with these settings and otherwise the usual ones."""
    wanted = {"data": data, "attack": attack, **_DEFAULTS, **settings}
    return [cell for cell in record["cells"] if wanted.items() <= cell.items()]


def _values(record: Record, data: str, name: str, **settings: Any) -> list[Any]:
    """Return all values of a setting among cells with the given settings."""
    wanted = {"data": data, **settings}
    return sorted({cell[name] for cell in record["cells"] if wanted.items() <= cell.items()})


def _scores(record: Record, data: str, attack: str, **settings: Any) -> list[str]:
    cells = _cells(record, data, attack, **settings)
    return [_spread(cells, score) for score in _SCORES]


def _spread(cells: Sequence[CellRecord], score: str, scale: float = 100, digits: int = 1) -> str:
    """Format a result's mean and standard deviation over seeds; scores are in percent."""
    mean, deviation = _statistics(cells, score, scale)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}" if len(cells) > 1 else f"{mean:.{digits}f}"


def _statistics(cells: Sequence[CellRecord], score: str, scale: float = 100) -> tuple[float, float]:
    values = [scale * cell["result"][score] for cell in cells]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


@rc_context(STYLE)
def _blocks_picture(record: Record) -> str:
    """Return an SVG with ROUGE-1 of each attack by head blocks, a panel for each data."""
    names = list(record["covered"])
    figure = Figure(figsize=(4.5 * len(names), 3.4), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, data in zip(panels, names, strict=True):
        for attack in ("linear", "transformer", "optimisation", "search"):
            blocks = _values(record, data, "head_blocks", attack=attack)
            cells = [_cells(record, data, attack, head_blocks=number) for number in blocks]
            if cells:
                _draw(panel, blocks, cells, _ATTACKS[attack], _LINES[attack])
        chance = _cells(record, data, "transformer", seen="nothing")
        if chance:
            level = statistics.mean(100 * cell["result"]["rouge1"] for cell in chance)
            panel.axhline(level, color=GREY, linestyle=":", label="chance")
        panel.set(title=data, xlabel="head blocks", ylim=(0, 104))
    panels[0].set_ylabel("ROUGE-1, %")
    panels[0].legend(fontsize="small", loc="upper right", bbox_to_anchor=(1, 0.95), ncols=2)
    return svg(figure)


@rc_context(STYLE)
def _noise_picture(record: Record) -> str:
    """Return an SVG with ROUGE-1 by noise, and beside it the held-out loss."""
    data, *_ = record["covered"]
    noises = _values(record, data, "noise", attack="loss")
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    scores, losses = figure.subplots(1, 2)
    for attack in ("transformer", "search"):
        cells = [_cells(record, data, attack, noise=noise) for noise in noises]
        _draw(scores, noises, cells, _ATTACKS[attack], _LINES[attack])
    scores.set(ylabel="ROUGE-1, %", ylim=(0, 104))
    for key, label in _LOSSES.items():
        cells = [_cells(record, data, "loss", noise=noise) for noise in noises]
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
    """Draw the mean of the cells of each value, with its standard deviation."""
    means, deviations = zip(*(_statistics(each, score, scale) for each in cells), strict=True)
    panel.errorbar(values, means, yerr=deviations, capsize=3, label=label, **line)
