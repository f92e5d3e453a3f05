"""Carry out an experiment's runs, each in its own folder."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chambers.errors import CommandError
from chambers.experiment.plan import Run
from chambers.in_process import run_in_process
from chambers.train import count_clients
from federation.run_config import RunConfig
from federation.run_folder import checkpoint_files, read_status


def carry_out(run: Run, config: RunConfig, folder: Path) -> Path:
    """Carry out a run in this process unless it has completed; return its folder.

    An interrupted run continues from its last checkpoint. ``config`` is the run config without
    ``output-dir`` and ``state-path``; ``folder`` is the experiment's folder. Raise ``CommandError``
    if the run fails.
    """
    directory = folder / "runs" / run.name
    before = _folders(directory)
    if completed := [each for each in before if read_status(each).phase == "completed"]:
        return completed[0]
    state = folder / "state" / run.name
    values = config.flat() | {"output-dir": str(directory), "state-path": str(state)}
    if resumable := [each for each in before if checkpoint_files(each)]:
        values["resume"] = str(resumable[0])
    output = directory / "output.txt"
    try:
        with _output_to(output):
            run_in_process(values, run.clients or count_clients(values))
    except Exception as error:
        problem = f"the run {run.name} failed ({error}); its output is in {output}"
        raise CommandError(problem) from error
    return _folders(directory)[0]


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Append to a file what this process prints within the block."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with file.open("ab") as opened:
        os.dup2(opened.fileno(), 1)
        os.dup2(opened.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(before, start=1):
            os.dup2(copy, number)
            os.close(copy)


def _folders(directory: Path) -> list[Path]:
    """Return the folders of a run's attempts, the newest first."""
    return sorted((each for each in directory.glob("*") if each.is_dir()), reverse=True)


def check_settings(run: Run, folder: Path) -> None:
    """Record a new run's settings; raise ``CommandError`` if its folder has different ones."""
    file = folder / "runs" / run.name / "settings.json"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict(run.settings), indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if other := sorted(dict(before.items() ^ run.settings.items())):
        raise CommandError(
            f"{file.parent} is from a run with different settings ({', '.join(other)}); name "
            "another folder with --output"
        )
