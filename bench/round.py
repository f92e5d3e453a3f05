"""Overhead of a federated round over its slowest client's training.

    python -m bench.round

The same run of FedJudge-Base is timed in a simulation, in a deployment with a SuperLink and
SuperNodes on this machine, and in a deployment with resident workers. Every process has one torch
thread; clients train at the same time, so each needs a core. The first round, in which processes
start and workers load the model, is excluded. A round is timed from its train messages to the last
reply. Deployments are on loopback with ``--insecure``: no proxy, no TLS, no node keys.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import command, make_table, show
from chambers.superlink import COMPLETED, SuperLink, free_port, private_superlink, run_app
from federation.run_folder import METRICS, read_events
from federation.site_file import VARIABLE
from finetuning.generated import STYLES, examples
from tests.deployment.deployment import CHECKOUT
from tests.site_files import write_site

_CLIENTS = STYLES[:2]
_STEPS, _ROUNDS = 150, 4  # steps per round; rounds, of which the first is not measured
_ROWS = {"train": 200, "test": 4}
_CONFIG: Mapping[str, Any] = {
    "strategy": "fedjudge-base",
    "rounds": _ROUNDS,
    "min-nodes": len(_CLIENTS),
    "model.name": "tiny",
    "train.local-steps": _STEPS,
    "evaluate.every": _ROUNDS,
}


def deploy(folder: Path, workers: bool) -> list[tuple[float, float]]:
    """Run on SuperNodes, with or without resident workers; return the result of `_run`."""
    home = folder / ("workers" if workers else "processes")
    with private_superlink(home, simulated=False) as link:
        for name in _CLIENTS:
            own = home / name
            own.mkdir()
            worker = {"worker": own / "worker.sock"} if workers else {}
            site = write_site(own, name, folder / "data" / name, **worker)
            if workers:
                command = [sys.executable, "-m", "chambers", "site", "worker", str(own)]
                _start(command, link, own / "worker.log", site)
            command = ["flower-supernode", "--insecure", "--superlink", link.address]
            command += ["--host", "127.0.0.1", "--port", str(free_port())]
            _start(command, link, own / "supernode.log", site)
        return _run(link, home, {"instruction-key": "none"}, supernodes=None)


def _run(
    link: SuperLink, home: Path, config: Mapping[str, Any], supernodes: int | None
) -> list[tuple[float, float]]:
    """Run, and return the seconds of each measured round and of its slowest client's training."""
    folders = {"output-dir": str(home / "runs"), "state-path": str(home / "state")}
    status = run_app(
        app=CHECKOUT,
        superlink=link,
        run_config={**_CONFIG, **folders, **config},
        supernodes=supernodes,
    )
    if status != COMPLETED:
        raise SystemExit(f"the run ended with {status}; its logs were in {home}")
    (directory,) = (home / "runs").iterdir()
    seconds: dict[tuple[str, int], list[float]] = {}
    for event in read_events(directory / METRICS):
        if event["event"] in {"round", "train"}:
            seconds.setdefault((event["event"], event["round"]), []).append(event["seconds"])
    measured = range(2, _ROUNDS + 1)
    return [(max(seconds["round", n]), max(seconds["train", n])) for n in measured]


def _start(command: list[str], link: SuperLink, log: Path, site: Path) -> None:
    """Start an institution's process, which ends with the SuperLink."""
    own = link.environment | {VARIABLE: str(site)}
    with log.open("wb") as output:
        subprocess.Popen(command, cwd=CHECKOUT, env=own, stdout=output, stderr=output)


def _write_data(folder: Path) -> None:
    for name in _CLIENTS:
        (folder / name).mkdir(parents=True)
        for part, count in _ROWS.items():
            rows = examples(style=name, count=count, seed=0, split=part)  # type: ignore[arg-type]
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
            (folder / name / f"{part}.jsonl").write_text("".join(lines))


def main() -> None:
    """Measure, and print the tables."""
    command(__doc__).parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _write_data(folder / "data")
        home, config = folder / "simulation", {"data.path": str(folder / "data")}
        with private_superlink(home) as link:
            simulated = _run(link, home, config, supernodes=len(_CLIENTS))
        measured = {
            "simulation": simulated,
            "deployment": deploy(folder, workers=False),
            "deployment with workers": deploy(folder, workers=True),
        }
    rounds = make_table("", "round s", "slowest client's training s", "round ÷ training")
    for name, own in measured.items():
        ratio = median(seconds / training for seconds, training in own)
        seconds, training = map(median, zip(*own, strict=True))
        rounds.add_row(name, f"{seconds:.1f}", f"{training:.1f}", f"{ratio:.3f}")
    show(
        f"{len(_CLIENTS)} clients, {_STEPS} steps per round, model `tiny`; medians over rounds",
        rounds,
    )


if __name__ == "__main__":
    main()
