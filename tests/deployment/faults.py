"""Runs whose processes are killed: ``python -m tests.deployment.faults [FOLDER] --runs 40``.

Each run has a separate deployment with one coordinator and two institutions. One of the processes
is killed at a random moment, as if its container had been stopped, and a supervisor restarts
programs that have ended. The run must complete with the adapter that its participants imply, or
stop with an error that names the reason, and then be resumable. FOLDER contains a file for each
run, so that an interrupted measurement can be continued, and the last deployment's folders.

The runs alternate between FedJudge and FL-GLM, and cycle through all processes. Moments and
``min-nodes`` are drawn from the seed. A run that ended before its process was killed is repeated
with another draw.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import load_file

from bench.harness import make_table, show
from federation.run_config import Scalar
from federation.run_folder import METRICS_FILE, read_events
from finetuning.generated import examples
from finetuning.model.tiny import build_tiny
from tests.deployment.deployment import COMPLETED, Deployment, deployment
from tests.deployment.hosts import FOLDER
from tests.deployment.program import DeploymentError
from tests.deployment.supervisor import (
    PROCESSES,
    RESTART_SECONDS,
    all_active,
    left_running,
    start_again,
    supervised,
)

ROWS = {"consultation": 8, "court": 16}
_FEDJUDGE: dict[str, dict[str, Scalar]] = {
    "fedjudge-base": {"strategy": "fedjudge-base"},
    "fedjudge-cl": {"strategy": "fedjudge-cl"},
}
_FL_GLM: dict[str, dict[str, Scalar]] = {
    "serial": {"strategy": "fl-glm"},
    "client-batch": {"strategy": "fl-glm", "split.schedule": "client-batch"},
    "hierarchical": {"strategy": "fl-glm", "split.schedule": "hierarchical"},
}
WAYS = _FEDJUDGE | _FL_GLM
_SETTINGS: dict[str, Scalar] = {
    "train.local-steps": 4,
    "train.batch-size": 2,
    "train.accumulation": 1,
    "train.optimizer-state": "keep",
    "node-timeout": 120.0,
    "round-timeout": 150.0,
    "split.join-timeout": 30.0,
}
# No run may take longer: two rounds and evaluations, registration, and the restarts.
_MAX_SECONDS = 900.0


@dataclass(frozen=True)
class Outcome:
    """A run in which a process was killed.

    Attributes:
        way: How the run trained; a key of ``WAYS``.
        process: The process that was killed; a key of ``PROCESSES``.
        min_nodes: The run's ``min-nodes``.
        moment: When the process was killed, in seconds from the run's submission; negative if the
            run had ended before.
        status: Status of the run, with the reason if it failed.
        resumed: Status of the resumed run; empty if the run completed.
        seconds: Duration of the run, without the resumption.
        adapter: What the global adapter was compared with.
        faults: What went wrong; empty if nothing did.

    """

    way: str
    process: str
    min_nodes: int
    moment: float
    status: str
    resumed: str
    seconds: float
    adapter: str
    faults: list[str]


def planned(index: int) -> tuple[str, str]:
    """Return how a run trains and the process that is killed, as keys of the dictionaries.

    Every way of training is combined with every process: in each pass through the processes, the
    ways are shifted by one.
    """
    ways = [_FEDJUDGE, _FL_GLM][index % 2]
    lap, process = divmod(index // 2, len(PROCESSES))
    return list(ways)[(process + lap) % len(ways)], list(PROCESSES)[process]


def measure(folder: Path, index: int, seed: int, rounds: int) -> Outcome:
    """Repeat a run until its process has been killed before the run's end, or a run has faults.

    Args:
        folder: Stores the adapters of undisturbed runs, and the deployment's files.
        index: Number of the run.
        seed: Seed of all draws.
        rounds: Rounds of the run.

    """
    draw = random.Random(f"{seed} {index}")
    while True:
        outcome = disturbed(folder, *planned(index), rounds, draw)
        if outcome.moment >= 0 or outcome.faults:
            return outcome


def disturbed(folder: Path, way: str, process: str, rounds: int, draw: random.Random) -> Outcome:
    """Train once, and kill a process during the run.

    Args:
        folder: As in ``measure``.
        way: How to train; a key of ``WAYS``.
        process: The process to kill; a key of ``PROCESSES``.
        rounds: Rounds of the run.
        draw: Source of the moment and of ``min-nodes``.

    """
    min_nodes = draw.choice([1, 2])
    settings = _SETTINGS | WAYS[way] | {"rounds": rounds, "evaluate.every": rounds}
    with deployed(folder) as running:
        reference, length = undisturbed(folder / f"{way}-{rounds}", running, settings)
        settings["min-nodes"] = min_nodes
        running.submit(settings)
        started = time.monotonic()
        with supervised(running, process, draw.uniform(0.0, length)) as fault:
            status = wait_for_end(running)
        seconds = time.monotonic() - started
        faults = [] if status.startswith("finished:") else [f"it did not end: {status}"]
        if status.startswith("finished:failed") and ": " not in status:
            faults.append("it failed without a reason")
        resumed = ""
        if status != COMPLETED:
            resumed = resume(running, settings)
            if resumed != COMPLETED:
                faults.append(f"it could not be resumed: {resumed}")
        adapter = ""
        if COMPLETED in {status, resumed}:
            adapter, problems = check_results(newest_run(running), reference)
            faults += problems
        running.stop()
        faults += [f"{each} was left running" for each in left_running(running)]
    return Outcome(
        way=way,
        process=process,
        min_nodes=min_nodes,
        moment=round(fault.moment, 1),
        status=status,
        resumed=resumed,
        seconds=round(seconds, 1),
        adapter=adapter,
        faults=faults,
    )


def undisturbed(
    folder: Path, running: Deployment, settings: Mapping[str, Scalar]
) -> tuple[Path, float]:
    """Return the global adapter of a run without faults, and its duration.

    Args:
        folder: Stores the adapter and the duration; if it lacks them, a run is made.
        running: The deployment.
        settings: Settings of the run.

    """
    file, account = folder / "global.safetensors", folder / "duration.json"
    if not account.exists():
        started = time.monotonic()
        status, log = running.run(settings)
        if status != COMPLETED:
            raise SystemExit(f"the run without faults failed:\n{log[-3000:]}")
        seconds = time.monotonic() - started
        folder.mkdir(exist_ok=True)
        results = newest_run(running)
        assert results is not None  # the run has completed
        shutil.copy(_global_adapter(results), file)
        # If a disturbed run leaves no folder, this run must not be mistaken for it.
        shutil.rmtree(results)
        account.write_text(json.dumps({"seconds": seconds}))
    return file, float(json.loads(account.read_text())["seconds"])


@contextmanager
def deployed(folder: Path) -> Iterator[Deployment]:
    """Start a deployment of two institutions with generated text, and a tiny model."""
    hosts, data = folder / "hosts", folder / "data"
    shutil.rmtree(hosts, ignore_errors=True)
    hosts.mkdir(parents=True)
    for name, count in ROWS.items():
        (data / name).mkdir(parents=True, exist_ok=True)
        _write(data / name / "train.jsonl", examples(name, count, 0, "train"))
        _write(data / name / "test.jsonl", examples(name, 4, 0, "test"))
    model = folder / "model"
    if not model.exists():
        shutil.copytree(build_tiny(), model)
    with deployment(hosts, {name: data / name for name in ROWS}, model, worker=True) as running:
        yield running


def _write(file: Path, rows: list[dict[str, str]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def wait_for_end(running: Deployment) -> str:
    """Wait until the newest run has ended, and return its status."""
    end = time.monotonic() + _MAX_SECONDS
    status = "unknown"
    while time.monotonic() < end:
        # The SuperLink may be the killed process.
        with suppress(DeploymentError, subprocess.TimeoutExpired, ValueError):
            status = running.status()
            if status.startswith("finished:"):
                return status
        time.sleep(3.0)
    return f"{status} after {_MAX_SECONDS:g} s"


def resume(running: Deployment, settings: Mapping[str, Scalar]) -> str:
    """Continue the run from its last checkpoint, or from the beginning if there is none."""
    end = time.monotonic() + _MAX_SECONDS
    while not all_active(running) and time.monotonic() < end:
        start_again(running)
        time.sleep(RESTART_SECONDS)
    folder = newest_run(running)
    more: dict[str, Scalar] = {}
    if folder is not None and list((folder / "checkpoints").glob("round-*")):
        more["resume"] = _inside(running, folder)
    status, _ = running.run({**settings, **more})
    return status


def newest_run(running: Deployment) -> Path | None:
    """Return the folder of the newest run's results; None if it has none."""
    state = running.hosts["coordinator"].folder / "state"
    runs = [*(state / ".local" / "share" / "chambers" / "runs").glob("*")]
    return max(runs, key=lambda folder: folder.name, default=None)


def _inside(running: Deployment, path: Path) -> str:
    """Return the path at which the coordinator's programs see a file."""
    host = running.hosts["coordinator"]
    return f"{FOLDER}/{path.relative_to(host.folder)}" if host.namespace else str(path)


def check_results(folder: Path | None, reference: Path) -> tuple[str, list[str]]:
    """Compare a completed run's global adapter with the one that its participants imply.

    If all institutions took part in every round, the adapter must equal the undisturbed run's, bit
    for bit. Otherwise it must be the weighted average of the last round's participants' adapters.

    Returns:
        What was compared, and what is wrong.

    """
    if folder is None:
        return "", ["it has no results"]
    problems = [f"{file.name} can't be read" for file in _unreadable(folder)]
    events = read_events(folder / METRICS_FILE)
    rounds = [event for event in events if event["event"] == "round"]
    own = load_file(_global_adapter(folder))
    missing = any(event["event"] == "evaluation-missing" for event in events)
    if all(each["participants"] == list(ROWS) for each in rounds) and not missing:
        whole = load_file(reference)
        same = own.keys() == whole.keys() and all(own[k].equal(whole[k]) for k in own)
        return "undisturbed run", problems + ([] if same else ["another adapter"])
    names = rounds[-1]["participants"]
    total = sum(ROWS[name] for name in names)
    parts = {name: load_file(_adapter(folder / "adapters" / "clients" / name)) for name in names}
    for key, value in own.items():
        mean = sum(ROWS[name] / total * parts[name][key].double() for name in names)
        if not torch.allclose(value.double(), torch.as_tensor(mean), rtol=0, atol=1e-6):
            return "average", [*problems, f"{key} is not the average of {names}"]
    return f"average of {', '.join(names)}", problems


def _unreadable(folder: Path) -> Iterator[Path]:
    for file in folder.glob("checkpoints/round-*"):
        try:
            with safe_open(file, "pt") as content:
                json.loads(content.metadata()["checkpoint"])
                for key in content.keys():  # noqa: SIM118
                    content.get_tensor(key)
        except Exception:
            yield file


def _global_adapter(folder: Path | None) -> Path:
    assert folder is not None
    return _adapter(folder / "adapters" / "global")


def _adapter(folder: Path) -> Path:
    return folder / "adapter_model.safetensors"


def _table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table of how the runs ended, by killed process and way of training."""
    table = make_table("", *WAYS)
    for process in PROCESSES:
        of_process = [outcome for outcome in outcomes if outcome.process == process]
        cells = []
        for way in WAYS:
            own = [outcome for outcome in of_process if outcome.way == way]
            completed = sum(each.status == COMPLETED for each in own)
            resumed = sum(each.resumed == COMPLETED for each in own)
            cells.append(f"{completed}+{resumed}" if own else "–")
        table.add_row(process, *cells)
    return table


def _summary(outcomes: Sequence[Outcome]) -> str:
    """Return a summary of the comparisons of adapters, and of the faults."""
    undisturbed = sum(each.adapter == "undisturbed run" for each in outcomes)
    averages = sum(each.adapter.startswith("average") for each in outcomes)
    faults = "; ".join(fault for each in outcomes for fault in each.faults)
    return (
        f"{len(outcomes)} runs; global adapter equal to the undisturbed run's: {undisturbed}, "
        f"average of those who took part: {averages}; faults: {faults or 'none'}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Execute the runs that are not recorded yet, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder",
        type=Path,
        nargs="?",
        default=Path("runs/faults"),
        help="records, one for each run (default: runs/faults)",
    )
    parser.add_argument("--runs", type=int, default=40, help="number of runs (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (default: 0)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each run (default: 2)")
    options = parser.parse_args(arguments)
    outcomes = []
    for index in range(options.runs):
        name = " ".join(planned(index)).replace(" ", "-").replace(",", "").lower()
        record = options.folder / f"run-{options.seed}-{index:03d}-{name}.json"
        if not record.exists():
            outcome = measure(options.folder, index, options.seed, options.rounds)
            record.write_text(json.dumps(asdict(outcome), indent=1) + "\n")
        outcomes.append(Outcome(**json.loads(record.read_text())))
    show("completed + resumed, by killed process", _table(outcomes), _summary(outcomes))
    if any(outcome.faults for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    # Let SIGTERM also end the deployment.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
