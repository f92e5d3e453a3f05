"""The table of ``bench.continual``, of results or of their record."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.weights import origin
from finetuning.evaluation.intervals import half_width

_HEADINGS = (
    *("importance", "share wanted", "λ", "share measured", "s"),
    *("held-out loss, global", "− FedJudge-Base [95 %]"),
    *("held-out loss, personalised", "− FedJudge-Base [95 %]"),
)
_MODELS = ("global", "personalised")
Result = dict[str, Any]
# Results of `cell`, in the order of seeds, by importance and λ.
Results = Mapping[tuple[str, float], list[Result]]
# Importance, share that was wanted if any, and λ.
Row = tuple[str, float | None, float]


def table(rows: Sequence[Row], results: Results) -> str:
    """Return the table in Markdown.

    Args:
        rows: What to show, FedJudge-Base excepted, which comes first.
        results: Results of `cell` by importance and λ, in the order of seeds; FedJudge-Base's are
            those of ``("server", 0.0)``.

    """
    base = results["server", 0.0]
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), ("–", "–", "0", *_measured(base, base))]
    for importance, share, weight in rows:
        wanted = "–" if share is None else f"{100 * share:g} %"
        measured = _measured(results[importance, weight], base)
        lines.append((importance, wanted, f"{weight:g}", *measured))
    seeds = [result["seed"] for result in base]
    about = f"Means over {len(seeds)} seeds; after ± their standard deviation.\n\n"
    return about + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def paired_interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of paired differences, and its 95 % interval by Student's t.

    Raises:
        ValueError: There are fewer than two.

    """
    if len(differences) < 2:
        raise ValueError("an interval needs at least two pairs")
    mean, half = statistics.mean(differences), half_width(differences)
    return mean, mean - half, mean + half


def recorded(
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    rows: Sequence[Row],
    results: Results,
) -> dict[str, Any]:
    """Return everything that `document` shows, for a JSON file.

    Args:
        settings: The run config of all runs.
        provenance: The ``model digest`` of the base model, and ``versions`` of libraries.
        rows: As for `table`.
        results: As for `table`.

    """
    return {
        "settings": {key: _without_place(value) for key, value in settings.items()},
        **provenance,
        "rows": [list(row) for row in rows],
        "results": [
            {"importance": importance, "lambda": weight, "seeds": own}
            for (importance, weight), own in results.items()
        ],
    }


def document(record: Mapping[str, Any]) -> str:
    """Return what was measured, the table and what follows from it, in Markdown."""
    settings = record["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    rows: list[Row] = [(importance, share, weight) for importance, share, weight in record["rows"]]
    results = {(each["importance"], each["lambda"]): each["seeds"] for each in record["results"]}
    steps = settings["train.local-steps"]
    trained = f"{steps} steps" if steps else "an epoch"
    about = (
        f"Model {settings['model.name']}, three generated clients, {settings['rounds']} rounds of "
        f"{trained}; {versions}. Differences are paired by seed."
    )
    weights = origin([record["model digest"]])
    about = " ".join(part for part in (about, weights) if part)
    return f"{about}\n\n{table(rows, results)}\n{_reading(rows, results)}\n"


def _without_place(value: Any) -> Any:
    """Return only the name of a folder, whose place says nothing to others."""
    is_place = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_place else value


def _reading(rows: Sequence[Row], results: Results) -> str:
    """Return a sentence on how many intervals are below and above 0."""
    base = results["server", 0.0]
    if len(base) < 2:
        return "One seed shows nothing about the difference."
    intervals = [
        paired_interval(_differences(results[importance, weight], base, model))
        for importance, _, weight in rows
        for model in _MODELS
    ]
    lower = sum(high < 0 for _, _, high in intervals)
    higher = sum(low > 0 for _, low, _ in intervals)
    return (
        f"Of {len(intervals)} differences, {lower} are below 0 with their whole interval (the "
        f"penalty lowers the held-out loss), {higher} are above 0, and "
        f"{len(intervals) - lower - higher} can't be told from 0 with {len(base)} seeds."
    )


def _differences(own: list[Result], base: list[Result], model: str) -> list[float]:
    """Return the differences of the mean held-out loss, seed by seed."""
    return [
        _mean_loss(result, model) - _mean_loss(other, model)
        for result, other in zip(own, base, strict=True)
    ]


def _measured(own: list[Result], base: list[Result]) -> tuple[str, ...]:
    """Return the cells from the measured share on."""
    cells = [
        f"{100 * statistics.mean(r['share'] for r in own):.1f} %",
        _spread([r["distance"] for r in own]),
    ]
    for model in _MODELS:
        cells.append(_spread([_mean_loss(result, model) for result in own]))
        cells.append("–" if own is base else _interval(_differences(own, base, model)))
    return tuple(cells)


def _mean_loss(result: Result, model: str) -> float:
    return float(statistics.mean(result[model].values()))


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def _interval(differences: list[float]) -> str:
    if len(differences) < 2:
        return f"{differences[0]:+.4f}"
    mean, low, high = paired_interval(differences)
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
