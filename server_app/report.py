"""The report of a run: one self-contained HTML page.

The report is generated from ``metrics.jsonl`` and ``config.json``, which every run writes. It can
be generated during a run, or after a run was killed. Client names are not trusted: the template
escapes all values, and plots show no names.
"""

import io
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from markupsafe import Markup

from federation.messages import MODELS
from federation.run_config import RunConfig
from federation.run_folder import METRICS_FILE, Event, read_events
from finetuning.files import write_file
from server_app.joining import (
    Questions,
    count_right,
    count_schools,
    is_on_matters,
    mean_losses,
)
from server_app.page import PAGE

Curve = dict[int, float]  # values by round
Looks = Mapping[str, tuple[str, str, str]]  # by client: colour, marker, marker as a character


def write_report(directory: Path) -> Path:
    """Write ``report.html`` to a run's folder, based on its metrics and configuration.

    Raise ``ValueError`` if the metrics or the configuration are malformed.
    """
    from matplotlib import rc_context

    config = json.loads((directory / "config.json").read_bytes())
    events = read_events(directory / METRICS_FILE)
    with rc_context(_RC):
        html = _render(events, config, _started(directory))
    report = directory / "report.html"
    write_file(report, html)
    return report


def latest_values(events: Iterable[Event]) -> dict[str, dict[str, Event]]:
    """Return the latest values by client and model, sorted by client name.

    Models trained alone are included only if some client has evaluated one.
    """
    chosen = [event for event in events if event["event"] in ("train", "evaluate")]
    has_alone = any(event.get("model") == "alone" for event in chosen)
    shown = [model for model in MODELS if model != "alone" or has_alone]
    latest: dict[str, dict[str, Event]] = {}
    for event in chosen:
        models = latest.setdefault(event["client"], {model: {} for model in shown})
        # Text isn't generated in every round: keep the previous score if there is no new one.
        known = {key: value for key, value in event.items() if value is not None}
        models.get(event.get("model", ""), {}).update(known)
    for name in {name for event in chosen for name in event.get("clients", ())}:
        latest.pop(name, None)  # only the mean of its group is known
    for models in latest.values() if has_alone else ():
        # A client whose training alone has failed has no such model any more.
        if models["alone"].get("round", 0) < models["global"].get("round", 0):
            models["alone"].clear()
    return dict(sorted(latest.items()))


def questions(events: Iterable[Event]) -> Questions:
    """Return, by client name and (question, reference), the latest answer of each model."""
    found: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for event in events:
        if event["event"] == "answers":
            own = found.setdefault(event["client"], {})
            for answer in event["answers"]:
                asked = answer["question"], answer["reference"]
                own.setdefault(asked, {})[event["model"]] = answer["text"]
    return dict(sorted(found.items()))


def _render(events: Sequence[Event], config: Mapping[str, Any], started: str) -> str:
    latest = latest_values(events)
    looks = {client: _LOOKS[i % len(_LOOKS)] for i, client in enumerate(latest)}
    rounds: dict[int, Event] = {}
    notes: list[Event] = []  # on each round's last average: late replies repeat an average
    for event in events:
        if event["event"] in ("round", "late"):
            before = rounds.get(event["round"], {})
            late = [*before.get("clients", []), *event.get("clients", [])]
            rounds[event["round"]] = before | event | {"clients": late}
            notes = [note for note in notes if note["round"] != event["round"]]
        if event["event"] in ("scaled", "evaluation-missing"):
            notes.append(event)
    own: dict[str, list[Event]] = {client: [] for client in latest}
    for event in events:
        if event.get("client") in own:
            own[event["client"]].append(event)
    plots = []
    for key, title, note in _PLOTS:
        curves = {name: _curve(own[name], key, event="train") for name in looks}
        last = {name: curve[max(curve)] for name, curve in curves.items() if curve}
        plots.append((title, note, _plot(title, curves, looks), last))
    shown = [model for models in latest.values() for model in models.values()]
    largest = {key: max(_known(shown, key), default=0.0) for key in _METRICS}
    usual = RunConfig().flat()
    answers = questions(events)
    return PAGE.render(
        config=config,
        changed={k: v for k, v in config.items() if k not in usual or v != usual[k]},
        unchanged={k: v for k, v in config.items() if k in usual and v == usual[k]},
        started=started,
        times=_times(events),
        counts=_counts(events),
        brought=mean_losses(latest) | count_right(answers, count_schools(latest, config)),
        latest=latest,
        looks=looks,
        withheld={e["client"]: e["withheld"] for e in events if "withheld" in e},
        models=list(next(iter(latest.values()), {})),
        tables=[(key, *text) for key, text in _METRICS.items() if _known(events, key)],
        cells=partial(_cells, latest, largest),
        questions=answers,
        on_matters=is_on_matters(config),
        panels={
            title: _panels(own=own, key=key, title=title, looks=looks) for key, title in _PANELS
        },
        plots=plots,
        rounds=[rounds[number] for number in sorted(rounds)],
        errors={e["round"]: e["error"] for e in events if e["event"] == "factors"},
        scaled=[note for note in notes if note["event"] == "scaled"],
        unevaluated=[note for note in notes if note["event"] == "evaluation-missing"],
    )


# The tables of results. Perplexity is the exponential of the loss.
_METRICS = {
    "loss": ("Held-out loss", "In nats per token; lower is better."),
    "rougeL": ("ROUGE-L", "0 to 1; higher is better."),
    "bleu4": ("BLEU-4", "0 to 1; higher is better."),
    "bleu_n": ("BLEU-N", "0 to 1; higher is better."),
}


def _known(rows: Iterable[Event], key: str) -> list[float]:
    values = (row.get(key) for row in rows)
    return [value for value in values if value is not None and isfinite(value)]


def _cells(
    latest: Mapping[str, Mapping[str, Event]], largest: Mapping[str, float], client: str, key: str
) -> list[tuple[str, bool, float]]:
    """Return, for each of a client's models, a table cell's text, whether it is best, and its bar.

    The length of the bar is a share of the largest value in the table.
    """
    models, most = latest[client].values(), largest[key]
    known = _known(models, key)
    best = (min if key == "loss" else max)(known) if len(known) > 1 else None
    cells = []
    for value in (model.get(key) for model in models):
        bar = value / most if value is not None and isfinite(value) and most > 0 else 0
        cells.append(
            ("-" if value is None else f"{value:,.3f}", value in known and value == best, bar)
        )
    return cells


def _started(directory: Path) -> str:
    """Return the date and time in the name of a run's folder, or an empty string."""
    found = re.match(r"(\d{4}-\d\d-\d\d)_(\d\d)-(\d\d)", directory.name)
    return f"{found[1]} {found[2]}:{found[3]}" if found else ""


def _times(events: Iterable[Event]) -> dict[str, str]:
    """Return the total time of training and of evaluations, if known."""
    sums: dict[str, float] = {}
    for event in events:
        kind = {"round": "training", "evaluation": "evaluations"}.get(event["event"])
        if kind and event.get("seconds") is not None:
            sums[kind] = sums.get(kind, 0.0) + event["seconds"]
    whole = {kind: divmod(round(seconds), 60) for kind, seconds in sums.items()}
    return {kind: f"{minutes} min {seconds} s" for kind, (minutes, seconds) in whole.items()}


def _counts(events: Iterable[Event]) -> dict[str, str]:
    """Return a text for each client with its numbers of training and held-out rows."""
    found: dict[str, dict[str, int]] = {}
    for event in events:
        kind = {"train": "training", "evaluate": "held-out"}.get(event["event"])
        if kind and event.get("examples"):
            found.setdefault(event["client"], {})[kind] = event["examples"]
    return {
        client: ", ".join(f"{own[k]:,} {k}" for k in ("training", "held-out") if k in own) + " rows"
        for client, own in found.items()
    }


_INK = "#010203"  # replaced by the page's text colour, so that plots match its light or dark theme
# Petroff's ten colours suit readers with colour-vision deficiencies; markers help in print.
_COLOURS = "#3f90da #bd1f01 #ffa90e #832db6 #94a4a2 #a96b59 #e76300 #717581 #b9ac70 #92dadd"
_LOOKS = list(zip(_COLOURS.split(), "os^DvPX<>*", "●■▲◆▼✚✖◀▶★", strict=True))
_LINES: dict[str, dict[str, Any]] = {  # by model; the base model's value is a horizontal line
    "base": {"linestyle": ":", "linewidth": 1.2},
    "global": {"linestyle": "-"},
    "personalised": {"linestyle": "--", "fillstyle": "none"},
    "alone": {"linestyle": "-.", "marker": "x"},
}
_PANELS = (("loss", "Held-out loss"), ("rougeL", "Held-out ROUGE-L"))
_DISTANCE = "s = Σ J·|W - Ŵ|: distance from the global adapter after training (FedJudge, Eq. 3)."
_PLOTS = (
    ("loss", "Training loss", "Mean over the round, in nats per target token."),
    ("importance_distance", "Distance weighted by importance", _DISTANCE),
    ("distance", "Distance from the global adapter", "‖W - Ŵ‖ after training."),
    ("penalty_gradient_share", "Penalty's share of the gradient norm", "At 1, data has no effect."),
)
_RC = {
    "svg.fonttype": "none",  # keep text as text, in the page's font
    "svg.hashsalt": "report",  # make the output reproducible
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.15,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def _curve(events: Iterable[Event], key: str, **which: str) -> Curve:
    """Return the values of ``key`` by round, for events that match all items of ``which``."""
    chosen = (e for e in events if e.items() >= which.items() and e.get(key) is not None)
    return dict(sorted({event["round"]: event[key] for event in chosen}.items()))


def _panels(
    own: Mapping[str, Sequence[Event]], key: str, title: str, looks: Looks
) -> dict[str, Markup]:
    """Plot each client's models in a separate panel; all panels have the same scale."""
    evaluated = [e for events in own.values() for e in events if e["event"] == "evaluate"]
    values = _known(evaluated, key)
    rounds = {event["round"] for event in evaluated if event["model"] != "base"}
    if not values or len(rounds) < 2:  # the table shows single values as bars
        return {}
    margin = 0.05 * (max(values) - min(values) or 1)
    limits = (min(values) - margin, max(values) + margin)
    return {
        client: _plot(
            title=f"{title} of {client}",
            curves={m: _curve(own[client], key, event="evaluate", model=m) for m in MODELS},
            looks=dict.fromkeys(MODELS, look),
            limits=limits,
        )
        for client, look in looks.items()
    }


def _plot(
    title: str, curves: Mapping[str, Curve], looks: Looks, limits: tuple[float, float] | None = None
) -> Markup:
    """Plot curves over rounds; the text alternative lists each curve's first and last values."""
    if max(map(len, curves.values()), default=0) < 2:
        return Markup()
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(3.6, 2.3) if limits else (5.4, 2.9), layout="constrained")
    axes = figure.add_subplot(xlabel="round", **({"ylim": limits} if limits else {}))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    values = []
    for name, curve in curves.items():
        color, marker, _ = looks[name]
        lines: dict[str, Any] = {"color": color, **(_LINES[name] if limits else {})}
        if not curve:
            continue
        first, last = curve[min(curve)], curve[max(curve)]
        if name == "base" and limits:
            axes.axhline(last, **lines)
        else:
            lines = {"marker": marker, "markersize": 4.5, **lines}
            lines["markevery"] = max(1, len(curve) // 10)
            axes.plot(list(curve), list(curve.values()), **lines)
        values.append(f"{name} from {first:.3g} to {last:.3g}")
    return _svg(figure, f"{title}: {', '.join(values)}")


def _svg(figure: Any, label: str) -> Markup:
    """Return a figure as inline SVG with a text alternative."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    own = f"{zlib.crc32(label.encode()):08x}-"  # ids must be unique within the page
    svg = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{own}", file.getvalue().partition("<svg ")[2])
    start = Markup('<svg role="img" aria-label="{}" ').format(label)
    return start + Markup(svg.replace(_INK, "currentColor"))
