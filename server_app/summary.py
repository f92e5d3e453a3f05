"""The last lines of a run: a table of the results, and where they are."""

import io
from pathlib import Path

from rich.console import Console
from rich.table import Table

from server_app.report import ClientSummary, summary_rows
from strategies.run_folder import METRICS, read_events


def summary(directory: Path) -> str:
    """Return a run's table: held-out loss per client and model, and ROUGE-L if known."""
    rows = summary_rows(read_events(directory / METRICS))
    scored = any(score is not None for row in rows for score in _scores(row))
    what = "Held-out loss and ROUGE-L" if scored else "Held-out loss"
    table = Table(title=f"{what} (the lowest loss of a client is in brackets)")
    table.add_column("client")
    for model in ("base", "global", "personalised"):
        table.add_column(f"loss\n{model}", justify="right")
    for model in ("base", "global", "personalised") if scored else ():
        table.add_column(f"ROUGE-L\n{model}", justify="right")
    for row in rows:
        losses = [row.base_loss, row.global_loss, row.personalised_loss]
        best = min((loss for loss in losses if loss is not None), default=None)
        scores = _scores(row) if scored else []
        table.add_row(
            row.client,
            *(_bracketed(loss, loss == best) for loss in losses),
            *("-" if score is None else f"{score:.3f}" for score in scores),
        )
    text = io.StringIO()
    Console(file=text, width=100, color_system=None).print(table)
    report, adapters = directory / "report.html", directory / "adapters"
    trained = f"\nAdapters: {adapters}" if adapters.is_dir() else ""
    return f"\n{text.getvalue()}\nReport:   {report}{trained}\nResults:  {directory}"


def _scores(row: ClientSummary) -> list[float | None]:
    return [row.base_rouge, row.global_rouge, row.personalised_rouge]


def _bracketed(loss: float | None, best: bool) -> str:
    if loss is None:
        return "-"
    return f"[{loss:.3f}]" if best else f"{loss:.3f} "
