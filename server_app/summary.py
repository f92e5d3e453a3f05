"""The final output of a run: tables of answers and results, and the path of the folder."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from federation.run_folder import METRICS_FILE, Event, read_events
from finetuning.errors import printable
from server_app.joining import count_rows, is_on_matters
from server_app.report import latest_values, questions

_CHARACTERS = 80  # maximum length of a text in the terminal
_ANSWERING = ("base", "alone", "global")


def summary(directory: Path) -> str:
    """Return a run's summary: the tables of answers (if any) and losses, and the results' paths."""
    events = read_events(directory / METRICS_FILE)
    config = json.loads((directory / "config.json").read_bytes())
    text = io.StringIO()
    console = Console(file=text, width=100, color_system=None)
    for table in (*_answers(events, is_on_matters(config)), _results(latest_values(events))):
        console.print(table)
    report, adapters = directory / "report.html", directory / "adapters"
    trained = f"\nAdapters: {adapters}" if adapters.is_dir() else ""
    return f"\n{text.getvalue()}\nReport:   {report}{trained}\nResults:  {directory}"


def _answers(events: Sequence[Event], on_matters: bool) -> list[Table]:
    """Return a list with a table of each client's first question; empty without answers."""
    title = "Held-out questions" + " on topics that only other clients have" * on_matters
    table = Table(title=title, show_header=False, box=box.SIMPLE_HEAD)
    table.add_column(width=12, no_wrap=True)
    table.add_column(width=_CHARACTERS, no_wrap=True)
    for client, own in questions(events).items():
        for (question, reference), answers in list(own.items())[:1]:
            rows = {client: question, "reference": reference}
            rows |= {name: answers[name] for name in _ANSWERING if name in answers}
            for name, text in rows.items():
                # Use Text, since rich parses plain strings as markup.
                table.add_row(Text(name), Text(printable(text, _CHARACTERS)))
            table.add_section()
    return [table] if table.rows else []


def _results(latest: Mapping[str, Mapping[str, Event]]) -> Table:
    """Return the table of held-out losses per client and model, with ROUGE-L if known."""
    scored = any("rougeL" in own for models in latest.values() for own in models.values())
    what = "Held-out loss and ROUGE-L" if scored else "Held-out loss"
    title = f"{what}{count_rows(latest)} (each client's lowest loss is in brackets)"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("client")
    shown = list(next(iter(latest.values()), {}))
    for model in shown:
        table.add_column(f"loss\n{model}", justify="right")
    for model in shown if scored else ():
        table.add_column(f"ROUGE-L\n{model}", justify="right")
    for client, models in latest.items():
        losses = [own.get("loss") for own in models.values()]
        best = min((loss for loss in losses if loss is not None), default=None)
        scores = [own.get("rougeL") for own in models.values()] if scored else []
        table.add_row(
            client,
            *(_bracket(loss, loss == best) for loss in losses),
            *("-" if score is None else f"{score:.3f}" for score in scores),
        )
    return table


def _bracket(loss: float | None, best: bool) -> str:
    if loss is None:
        return "-"
    return f"[{loss:.3f}]" if best else f"{loss:.3f} "
