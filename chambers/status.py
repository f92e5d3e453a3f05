"""``chambers status``: show the status of a run from the files in its folder."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from chambers.errors import CommandError
from chambers.sources import argument, option


@dataclass(frozen=True)
class Status:
    """Show the status of a run.

    The status is read from the run's folder at the coordinator. It includes whether the run is
    active, the round, remaining time and last checkpoint, and for each client the last training's
    results and the current state, or why the client is left out.

    \b
      chambers status runs/2026-01-31_12-00-00_fl-glm --watch

    With --coordinator, also show the free disk space for the SuperLink's database, and the address
    that has sent the most data to the SuperLink in the last hour.

    Of a folder with several runs, the status of the newest is shown.

    With --serve, show the status on a page instead, at http://127.0.0.1:PORT, and in the format of
    Prometheus, at /metrics.

    Without --serve, the exit status is 1 if the run failed or was killed, else 0.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    run: Annotated[Path, argument("RUN_FOLDER")]
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False
    coordinator: Annotated[
        Path | None, option("Folder with the SuperLink's database and the proxy's log.", "FOLDER")
    ] = None
    serve: Annotated[int | None, option("Serve the status on this port of loopback.", "PORT")] = (
        None
    )

    def __call__(self) -> int:
        """Show the status once or, with ``--watch``, until the run ends."""
        directory = self.run
        if not (directory / "config.json").is_file():
            # The names of runs begin with the time.
            directory = max(
                (f.parent for f in directory.glob("*/versions.json")), default=directory
            )
        # Folders of models and of an institution's state also contain a config.json.
        for name in ("config.json", "versions.json"):
            if not (directory / name).is_file():
                raise CommandError(f"{directory} is not the folder of a run: it has no {name}")
        if self.serve is not None:
            # With this variable, metrics would be stored in files, and add up over requests.
            os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None)
            from chambers.status_server import serve_status

            serve_status(directory, self.coordinator, self.serve)
            return 0
        from rich.console import Console
        from rich.live import Live

        from chambers.run_status import read_run_state, render_status

        console = Console(markup=False, emoji=False, highlight=False)
        if not console.is_terminal:
            console.width = 120
        try:
            run = read_run_state(directory, self.coordinator)
            if self.watch and console.is_terminal:
                with Live(render_status(run), console=console, auto_refresh=False) as live:
                    while run.is_running:
                        time.sleep(2.0)
                        run = read_run_state(directory, self.coordinator)
                        live.update(render_status(run), refresh=True)
                return run.exit_status
            console.print(render_status(run))
            while self.watch and run.is_running:
                time.sleep(30.0)  # less often, since output may go to a file
                run = read_run_state(directory, self.coordinator)
                console.print("", render_status(run))
            return run.exit_status
        except (OSError, ValueError) as error:
            raise CommandError(f"{directory} can't be read: {error}") from error
