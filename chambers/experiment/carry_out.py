"""Carry out an experiment's runs, each in a folder of its own."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from chambers.errors import CommandError
from chambers.experiment.plan import Run
from federation.resumption import checkpoint_files
from federation.run_config import Scalar
from federation.run_folder import read_status

_SETTINGS = "settings.json"
_OUTPUT = "output.txt"


def carry_out(run: Run, config: Mapping[str, Scalar], clients: int, folder: Path) -> Path:
    """Carry out a run that is not complete, in this process; return its folder.

    An interrupted run continues from its last checkpoint.

    Args:
        run: The run.
        config: Its run config, but for paths.
        clients: Number of its clients.
        folder: Folder of the experiment.

    Raises:
        CommandError: The run failed.

    """
    directory = folder / "runs" / run.name
    if (found := _completed(directory)) is not None:
        return found
    values = {
        **config,
        "output-dir": str(directory),
        "state-path": str(folder / "state" / run.name),
    }
    if resumable := [each for each in _folders(directory) if checkpoint_files(each)]:
        values["resume"] = str(resumable[0])
    output = directory / _OUTPUT
    try:
        with _output_to(output):
            from chambers.in_process import run_in_process

            run_in_process(values, clients)
    except Exception as error:
        text = f"the run {run.name} failed ({error}); its output is in {output}"
        raise CommandError(text) from error
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


def _completed(directory: Path) -> Path | None:
    """Return the folder of a run that has completed, among those in a folder."""
    for each in _folders(directory):
        if read_status(each).phase == "completed":
            return each
    return None


def _folders(directory: Path) -> list[Path]:
    """Return the folders of a run's attempts, the newest first."""
    return sorted((each for each in directory.glob("*") if each.is_dir()), reverse=True)


def check_settings(run: Run, folder: Path) -> None:
    """Record the settings of a new run.

    Raises:
        CommandError: The run in its folder has other settings.

    """
    directory = folder / "runs" / run.name
    file = directory / _SETTINGS
    if not file.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(dict(run.settings), indent=1) + "\n", encoding="utf-8")
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    other = sorted(
        key
        for key in before.keys() | run.settings.keys()
        if before.get(key) != run.settings.get(key)
    )
    if other:
        raise CommandError(
            f"{directory} is of a run with other settings: {', '.join(other)} differ; name another "
            "folder with --output"
        )
