"""Carry out an experiment's runs in this process."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from chambers.errors import CommandError
from chambers.experiment.plan import PlannedRun
from chambers.in_process import run_in_process
from chambers.settings import count_clients
from federation.run_config import RunConfig
from federation.run_folder import checkpoint_files, read_status
from finetuning.files import write_json
from finetuning.model.names import public_name


def carry_out(run: PlannedRun, config: RunConfig, folder: Path) -> Path:
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
            clients = run.clients or count_clients(values)
            run_in_process(values, clients, _write_policies(run, config, state, clients))
    except Exception as error:
        problem = f"the run {run.name} failed ({error}); its output is in {output}"
        raise CommandError(problem) from error
    return _folders(directory)[0]


def versions_of(run: PlannedRun, folder: Path) -> dict[str, str]:
    """Return the versions of the packages with which a completed run was carried out."""
    file = _folders(folder / "runs" / run.name)[0] / "versions.json"
    versions: dict[str, str] = json.loads(file.read_bytes())
    return versions


def _write_policies(run: PlannedRun, config: RunConfig, state: Path, clients: int) -> list[Path]:
    """Write each client a site policy with the run's privacy and files of its own; return them."""
    if run.privacy is None:
        return []
    files = []
    for number in range(clients):
        folder = state / "sites" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        terms = run.privacy.model_dump(by_alias=True)
        values = {
            "audit-log": str(folder / "audit.jsonl"),
            "hub-models": [public_name(config.model.name)],
            "paths": [str(state), *filter(os.path.isabs, (config.model.name, config.data.path))],
            "privacy": terms | {"account": str(folder / "privacy.jsonl")},
        }
        files.append(folder / "policy.toml")
        files[-1].write_text(tomli_w.dumps(values), encoding="utf-8")
    return files


def digest_of_data(config: RunConfig) -> str:
    """Return the SHA-256 digest of the files in ``data.path``; empty for other data."""
    path = Path(config.data.path).expanduser()
    if not config.data.path or not path.exists():
        return ""
    digest = hashlib.sha256()
    # Clients' folders may be links, which rglob doesn't follow.
    folders = os.walk(path, followlinks=True)
    found = [Path(folder, name) for folder, _, names in folders for name in names]
    for file in sorted(found or [path]):
        digest.update(f"{file.relative_to(path)}\n".encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def check_settings(run: PlannedRun, folder: Path, data: str) -> None:
    """Record a new run's settings, and the digest of its data if there is one.

    Raise ``CommandError`` if its folder has different ones.
    """
    file, settings = folder / "runs" / run.name / "settings.json", run.recorded
    settings |= {"data": data} if data else {}
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, settings)
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if other := sorted(k for k in before | settings if before.get(k) != settings.get(k)):
        raise CommandError(
            f"{file.parent} is from a run with different settings ({', '.join(other)}); name "
            "another folder with --output"
        )


@contextmanager
def _output_to(file: Path) -> Iterator[None]:
    """Append to a file what this process prints within the block."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = os.dup(1), os.dup(2)
    with file.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
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
