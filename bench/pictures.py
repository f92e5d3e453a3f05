"""The answers and pictures at the beginning of the README, made from recorded results.

    python -m bench.pictures [--run runs/…]

``docs/recorded/`` has the metrics of ``chambers train presets/smollm2.toml evaluate.every=1`` with
the base model's digest, and the result of ``python -m bench.split_step --record
docs/recorded/split_step.json``. With ``--run`` the metrics of another run replace the recorded ones
first. This writes ``docs/pictures/`` and the README's part between its two comments; a test fails
if they differ from what is recorded.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.drawing import BLUE, GREY, RED, STYLE, svg
from bench.markdown import escaped, shortened
from bench.weights import origin
from federation.answers import MODELS
from federation.run_folder import METRICS, Event, read_events
from finetuning.model.fingerprint import digest
from server_app.answers import questions
from server_app.report import ClientSummary, summary_rows

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "docs" / "recorded"
PICTURES = ROOT / "docs" / "pictures"
BASE_MODEL = "base-model"  # the event with its digest
RUN, STEP = RECORDED / "smollm2.jsonl", RECORDED / "split_step.json"
BEGIN, END = "<!-- from here on written by: python -m bench.pictures -->", "<!-- until here -->"

_MOST_CHARACTERS = 260  # of a text in the README
_PAPER = 1.97  # FL-GLM, section 4.3.1: split ÷ centralised, all parties on one machine
_LINES: Mapping[str, Mapping[str, Any]] = {
    "global": {"color": BLUE, "linestyle": "-", "marker": "o"},
    "personalised": {"color": RED, "linestyle": "--", "marker": "s", "fillstyle": "none"},
}
_BESIDE: Mapping[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 9}


@rc_context(STYLE)
def losses_picture(events: Sequence[Event]) -> str:
    """Return an SVG with each institution's held-out loss by round, a panel each."""
    rows = summary_rows(events)
    figure = Figure(figsize=(8.6, 3.0), layout="constrained")
    panels = figure.subplots(1, len(rows), squeeze=False, sharey=True)[0]
    for axes, row in zip(panels, rows, strict=True):
        ((_, base),) = _curve(events, row.client, "base")
        axes.axhline(base, linestyle=":", color=GREY, label="base")
        ends = []
        for model, line in _LINES.items():
            # Before the first round, both models are the base.
            curve = [(0, base), *_curve(events, row.client, model)]
            axes.plot(*zip(*curve, strict=True), label=model, **line)
            ends.append(curve[-1])
        # The higher one is labelled above its point, so that labels don't overlap.
        for (last, loss), place in zip(sorted(ends, key=lambda end: -end[1]), (1, -1), strict=True):
            axes.annotate(f"{loss:.2f}", (last, loss), (6, 6 * place), **_BESIDE)
        axes.annotate(f"{base:.2f}", (last, base), (6, 6), **_BESIDE)
        axes.set(title=row.client, xlabel="round", xticks=range(last + 1))
        axes.margins(x=0.12, y=0.12)
    panels[0].set_ylabel("held-out loss")
    panels[0].legend(frameon=False, fontsize=8)
    return svg(figure)


@rc_context(STYLE)
def split_picture(result: Mapping[str, Any]) -> str:
    """Return an SVG with the duration of split steps ÷ that of the whole model's."""
    sides = result["sides"][1:]
    names = [side["name"] for side in sides]
    values = [side["ratios"]["pairs"] for side in sides]
    figure = Figure(figsize=(8.6, 2.4), layout="constrained")
    axes = figure.add_subplot(xlabel="duration of a training step ÷ that of the whole model's")
    bars = axes.barh(names, values, color=BLUE, height=0.6)
    plain = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, fmt="%.2f", padding=4, bbox=plain)
    axes.axvline(1, color=GREY, linewidth=1)
    axes.axvline(_PAPER, color=RED, linestyle=":")
    paper = f"FL-GLM's own\non one machine: {_PAPER}"
    axes.annotate(paper, (_PAPER, 1.5), (-6, 0), **_BESIDE, ha="right", color=RED)
    axes.set_xlim(0, 1.1 * _PAPER)
    axes.invert_yaxis()
    return svg(figure)


def readme_part(events: Sequence[Event], result: Mapping[str, Any]) -> str:
    """Return the README's part that comes from recorded results."""
    rows = summary_rows(events)
    shown = {client: own[0] for client, own in questions(events).items()}
    table = [
        "| | " + " | ".join(shown) + " |",
        "|---" * (len(shown) + 1) + "|",
        _row("question", [question.text for question in shown.values()]),
        _row("reference", [question.reference for question in shown.values()]),
        *(_row(f"**{m}**", [q.answers.get(m, "") for q in shown.values()]) for m in MODELS),
    ]
    first = result["sides"][1]["ratios"]["pairs"]
    steps = sum(e["steps"] for e in events if e["event"] == "train") // len(rows)
    return "\n".join(
        [
            BEGIN,
            "SmolLM2-135M-Instruct before and after "
            f"{_rounds(events)} rounds of FedJudge-CL with {len(rows)} simulated institutions "
            "(`chambers train presets/smollm2.toml evaluate.every=1`). The table shows a held-out "
            "question of each institution and the answers of the base, global and personalised "
            f"models. After only {steps} optimizer steps per institution, the models imitate the "
            f"style of the answers but have not learned the law. {_weights(events)}".rstrip(),
            "",
            *table,
            "",
            f"![Held-out loss by round. {_described(rows)}](docs/pictures/smollm2.svg)",
            "",
            "The cost of splitting (FL-GLM, all hidden states encrypted): with all processes on "
            f"one core, a split training step of a small random Llama takes {first:.2f} times as "
            "long as a step of the whole model (`python -m bench.split_step`).",
            "",
            f"![{_compared(result)}](docs/pictures/split_step.svg)",
            END,
        ]
    )


def write(root: Path = ROOT) -> None:
    """Write the pictures, and the README's part."""
    events, result = recorded()
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "smollm2.svg").write_text(losses_picture(events), encoding="utf-8")
    (PICTURES / "split_step.svg").write_text(split_picture(result), encoding="utf-8")
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    readme.write_text(before + readme_part(events, result) + after, encoding="utf-8")


def recorded() -> tuple[list[Event], dict[str, Any]]:
    """Return the recorded run's events, and the recorded measurement of split steps."""
    return read_events(RUN), json.loads(STEP.read_text(encoding="utf-8"))


def _curve(events: Sequence[Event], client: str, model: str) -> list[tuple[int, float]]:
    """Return a model's held-out loss by round."""
    return [
        (event["round"], event["loss"])
        for event in events
        if event["event"] == "evaluate" and (event["client"], event["model"]) == (client, model)
    ]


def _rounds(events: Sequence[Event]) -> int:
    return max(int(event["round"]) for event in events if event["event"] == "round")


def _weights(events: Sequence[Event]) -> str:
    return origin([event["digest"] for event in events if event["event"] == BASE_MODEL])


def _row(name: str, texts: Sequence[str]) -> str:
    cells = (escaped(shortened(text, _MOST_CHARACTERS)) for text in texts)
    return f"| {name} | " + " | ".join(cells) + " |"


def _described(rows: Sequence[ClientSummary]) -> str:
    return "; ".join(
        f"{row.client}: base {row.base_loss:.2f}, global {row.global_loss:.2f}, "
        f"personalised {row.personalised_loss:.2f}"
        for row in rows
    )


def _compared(result: Mapping[str, Any]) -> str:
    parts = (f"{s['name']} {s['ratios']['pairs']:.2f}" for s in result["sides"][1:])
    return f"Duration of a split step ÷ the whole model's: {'; '.join(parts)}"


def main() -> None:
    """Record a run if one is named, and write the pictures and the README's part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", type=Path, help="folder of such a run of SmolLM2")
    arguments = parser.parse_args()
    if arguments.run:
        _record(arguments.run)
    write()


def _record(run: Path) -> None:
    """Replace the recorded metrics by those of a run, and add its base model's digest."""
    fingerprint = json.loads((run / "base-model.json").read_text(encoding="utf-8"))["digests"]
    first = json.dumps({"event": BASE_MODEL, "digest": digest(fingerprint)})
    metrics = (run / METRICS).read_text(encoding="utf-8")
    RUN.write_text(f"{first}\n{metrics}", encoding="utf-8")


if __name__ == "__main__":
    main()
