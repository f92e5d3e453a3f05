"""Tables of the attacks, made from the record."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from bench.attack.cells import Cell
from bench.harness import format_mean

_ATTACKS = {
    "linear": "decoder, linear",
    "transformer": "decoder, Transformer",
    "search": "search",
}
_LOSSES = {"loss_before": "base model", "loss_after": "trained"}
_DEFAULTS = {
    field.name: field.default
    for field in fields(Cell)
    if field.name not in {"data", "attack", "seed"}
}
_READ = ("decoder: ROUGE-1", "decoder: tokens read", "search: tokens read")
_Record = dict[str, Any]


def tables(record: _Record) -> list[str]:
    """Return the tables as Markdown."""
    return [
        _by_head_blocks(record),
        _by_wire_type(record),
        _by_noise(record),
        _on_the_network(record),
        _with_adapters(record),
        _from_gradients(record),
    ]


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(line)} |\n" for line in (headings, *rows))
    return "".join([first, "|" + "---|" * len(headings) + "\n", *others])


def one_cell_per_line(record: _Record) -> str:
    """Return the record as JSON with one cell per line, for readable diffs."""
    settings = json.dumps({**record, "cells": []}, indent=1)
    cells = ",\n  ".join(json.dumps(cell) for cell in record["cells"])
    return settings.replace('"cells": []', f'"cells": [\n  {cells}\n ]') + "\n"


def _by_head_blocks(record: _Record) -> str:
    """Return the table of attacks by number of head blocks, for all texts."""
    names = list(record["covered"])
    rows = []
    for attack, label in _ATTACKS.items():
        for blocks in _values(record, "head_blocks", attack=attack):
            cells = [_cells(record, attack, data=name, head_blocks=blocks) for name in names]
            rows.append((label, str(blocks), *(score for own in cells for score in _scores(own))))
    headings = (f"{name}: {score}" for name in names for score in ("ROUGE-1", "tokens read"))
    return _table(("attack", "head blocks", *headings), rows)


def _by_wire_type(record: _Record) -> str:
    rows = ((wire, *_read(record, wire=wire)) for wire in ("float32", "bfloat16", "int8"))
    return _table(("wire", *_READ), rows)


def _by_noise(record: _Record) -> str:
    rows = []
    for noise in _values(record, "noise", attack="loss"):
        cells = _cells(record, "loss", noise=noise)
        losses = (_format_score(cells, name, scale=1, digits=3) for name in _LOSSES)
        rows.append((f"{noise:g}", *losses, *_read(record, noise=noise)))
    names = (f"loss, {model}" for model in _LOSSES.values())
    return _table(("`split.noise`", *names, *_READ), rows)


def _on_the_network(record: _Record) -> str:
    rows = []
    for seen in ("hidden states", "encrypted records", "nothing"):
        name = "random numbers" if seen == "nothing" else seen
        rows.append((name, *_scores(_cells(record, "transformer", seen=seen))))
    return _table(("the decoder sees", "ROUGE-1", "tokens read"), rows)


def _with_adapters(record: _Record) -> str:
    rows = (
        (str(blocks), name, *_read(record, head_blocks=blocks, tuned=tuned))
        for blocks in _values(record, "head_blocks", tuned=True)
        for name, tuned in (("public", False), ("with adapter", True))
    )
    return _table(("head blocks", "client's head", *_READ), rows)


def _from_gradients(record: _Record) -> str:
    cells = [cell for cell in record["cells"] if cell["attack"] == "gradient"]
    rows = []
    for tail, wire, noise in sorted({(c["tail_blocks"], c["wire"], c["noise"]) for c in cells}):
        own = _cells(record, "gradient", tail_blocks=tail, wire=wire, noise=noise)
        rows.append((str(tail), wire, f"{noise:g}", _count(own)))
    return _table(("tail blocks", "wire", "`split.noise`", "labels read"), rows)


def _cells(record: _Record, attack: str, **settings: Any) -> list[_Record]:
    """Return the cells, one per seed, with these settings and defaults for all others."""
    wanted = {"data": next(iter(record["covered"])), "attack": attack, **_DEFAULTS, **settings}
    return [cell for cell in record["cells"] if wanted.items() <= cell.items()]


def _values(record: _Record, name: str, **settings: Any) -> list[Any]:
    """Return the values of ``name`` in the first data set's cells with the given settings."""
    wanted = {"data": next(iter(record["covered"])), **settings}
    return sorted({cell[name] for cell in record["cells"] if wanted.items() <= cell.items()})


def _read(record: _Record, **settings: Any) -> tuple[str, str, str]:
    """Return the Transformer's and the search's scores on the first data set, as in ``_READ``."""
    decoder, search = (_cells(record, attack, **settings) for attack in ("transformer", "search"))
    return *_scores(decoder), _count(search)


def _scores(cells: Sequence[_Record]) -> tuple[str, str]:
    """Return ROUGE-1, and the number of tokens that were read."""
    return _format_score(cells, "rouge1"), _count(cells)


def _count(cells: Sequence[_Record]) -> str:
    """Return the numbers of tokens (or labels) read and attacked, over all seeds."""
    results = [cell["result"] for cell in cells]
    read = sum(round(result["tokens"] * result["attacked"]) for result in results)
    return f"{read}/{sum(result['attacked'] for result in results)}" if results else "–"


def _format_score(cells: Sequence[_Record], score: str, scale: float = 100, digits: int = 1) -> str:
    """Format a result's mean and standard deviation over seeds; scores are in percent."""
    # The deviation is 0, for example, if all tokens were read.
    return format_mean([scale * cell["result"][score] for cell in cells], digits) if cells else "–"
