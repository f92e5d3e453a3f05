"""Carry out an experiment's runs through ``chambers train``, each in a folder of its own."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tomli_w

from chambers.errors import CommandError
from chambers.experiment.plan import Run
from federation.resumption import checkpoint_files
from federation.run_folder import read_status

_SETTINGS = "settings.json"
_OUTPUT = "output.txt"


def carry_out(
    runs: Sequence[Run],
    presets: Sequence[str],
    folder: Path,
    jobs: int,
    finished: Callable[[Run], None],
) -> dict[str, Path]:
    """Carry out all runs that are not complete, and return the folders of all, by the runs' names.

    An interrupted run continues from its last checkpoint.

    Args:
        runs: The runs.
        presets: Presets of all.
        folder: Folder of the experiment.
        jobs: Number of runs at once.
        finished: Called with each run that was carried out.

    Raises:
        CommandError: A run failed, or has other settings than the one in its folder.

    """
    for run in runs:
        _check_settings(run, folder / "runs" / run.name)

    def carry_out_one(run: Run) -> Path:
        directory = folder / "runs" / run.name
        found = _completed(directory)
        if found is None:
            _train(run, presets, directory, folder / "state" / run.name)
            finished(run)
            found = _completed(directory)
        assert found is not None
        return found

    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(carry_out_one, run) for run in runs]
        try:
            return {run.name: each.result() for run, each in zip(runs, futures, strict=True)}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _completed(directory: Path) -> Path | None:
    """Return the folder of a run that has completed, among those in a folder."""
    for each in _folders(directory):
        if read_status(each).phase == "completed":
            return each
    return None


def _folders(directory: Path) -> list[Path]:
    """Return the folders of a run's attempts, the newest first."""
    return sorted((each for each in directory.glob("*") if each.is_dir()), reverse=True)


def _check_settings(run: Run, directory: Path) -> None:
    """Refuse to continue a run with other settings; record those of a new one."""
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


def _train(run: Run, presets: Sequence[str], directory: Path, state: Path) -> None:
    settings = directory / "settings.toml"
    settings.write_text(tomli_w.dumps(dict(run.settings)), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "chambers", "train", *presets, str(settings)),
        *(f"output-dir={directory}", f"state-path={state}"),
    ]
    if run.clients is not None:
        command += ["--clients", str(run.clients)]
    resumable = [each for each in _folders(directory) if checkpoint_files(each)]
    if resumable:
        command.append(f"resume={resumable[0]}")
    output = directory / _OUTPUT
    with output.open("ab") as file:
        done = subprocess.run(command, stdout=file, stderr=file, check=False)
    if done.returncode != 0:
        said = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = next((line for line in reversed(said) if "chambers train:" in line), "no reason")
        raise CommandError(f"the run {run.name} failed ({reason}); its output is in {output}")
