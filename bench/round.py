"""Overhead of a federated round over its slowest client's training.

    python -m bench.round

The same run of FedJudge-Base in simulation, in a deployment with a SuperLink and SuperNodes on this
machine, and in a deployment with resident workers. Every process has one torch thread; clients
train at the same time, so each should have a core. The first round, in which processes start and
workers load the model, is excluded. A round lasts from its train messages to the average.
Deployments are on loopback with ``--insecure``: no proxy, no TLS, no node keys.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import make_table, show
from chambers.superlink import (
    COMPLETED,
    SuperLink,
    free_port,
    private_superlink,
    run_app,
)
from finetuning.generated import STYLES, examples
from tests.deployment.deployment import CHECKOUT

_CLIENTS = STYLES[:2]
_STEPS, _ROUNDS = 150, 4  # the first round is excluded
_ROWS = {"train": 200, "test": 4}
_CONFIG: Mapping[str, Any] = {
    "strategy": "fedjudge-base",
    "rounds": _ROUNDS,
    "min-nodes": len(_CLIENTS),
    "model.name": "tiny",
    "train.local-steps": _STEPS,
    "evaluate.every": _ROUNDS,
}


@dataclass(frozen=True)
class Round:
    """A measured round.

    Attributes:
        seconds: Duration of the round.
        training: Duration of the slowest client's training.

    """

    seconds: float
    training: float


@dataclass(frozen=True)
class Comparison:
    """The measured run.

    Attributes:
        folder: Folder for all files of the run.

    """

    folder: Path

    def simulate(self) -> list[Round]:
        """Run in simulation."""
        home = self.folder / "simulation"
        with private_superlink(home) as link:
            config = {"data.path": str(self.folder / "data")}
            return self._run(link, home, config, simulated=True)

    def deploy(self, workers: bool) -> list[Round]:
        """Run on SuperNodes, with or without resident workers."""
        home = self.folder / ("workers" if workers else "processes")
        with private_superlink(home, simulated=False) as link, ExitStack() as stack:
            for name in _CLIENTS:
                node = f'name="{name}" data-path="{self.folder / "data" / name}"'
                if workers:
                    socket = home / f"{name}.sock"
                    node += f' worker="{socket}"'
                    stack.enter_context(_worker(socket, link, home / f"{name}-worker.log"))
                stack.enter_context(_supernode(node, link, home / f"{name}.log"))
            return self._run(link, home, {"instruction-key": "none"}, simulated=False)

    def _run(
        self, link: SuperLink, home: Path, config: Mapping[str, Any], simulated: bool
    ) -> list[Round]:
        folders = {"output-dir": str(home / "runs"), "state-path": str(home / "state")}
        status = run_app(
            app=CHECKOUT,
            superlink=link,
            run_config={**_CONFIG, **folders, **config},
            supernodes=len(_CLIENTS) if simulated else None,
        )
        if status != COMPLETED:
            raise SystemExit(f"the run ended with {status}; its logs were in {home}")
        (directory,) = (home / "runs").iterdir()
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event.get("round", 0) > 1]
        rounds = []
        for event in events:
            if event["event"] == "round":
                trained = [
                    float(e["seconds"])
                    for e in events
                    if e["event"] == "train" and e["round"] == event["round"]
                ]
                rounds.append(Round(float(event["seconds"]), max(trained)))
        return rounds


def _supernode(node_config: str, link: SuperLink, log: Path) -> Any:
    command = ["flower-supernode", "--insecure", "--superlink", link.address]
    command += ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", node_config]
    return _running(command, link, log)


def _worker(socket: Path, link: SuperLink, log: Path) -> Any:
    return _running([sys.executable, "-m", "chambers", "site", "worker", str(socket)], link, log)


@contextmanager
def _running(command: list[str], link: SuperLink, log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=CHECKOUT, env=link.environment, stdout=output, stderr=output
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _write_data(folder: Path) -> None:
    for name in _CLIENTS:
        (folder / name).mkdir(parents=True)
        for part, count in _ROWS.items():
            rows = examples(style=name, count=count, seed=0, split=part)  # type: ignore[arg-type]
            lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows]
            (folder / name / f"{part}.jsonl").write_text("".join(lines))


def main() -> None:
    """Measure, and print the tables."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        _write_data(Path(folder) / "data")
        comparison = Comparison(Path(folder))
        measured = {
            "simulation": comparison.simulate(),
            "deployment": comparison.deploy(workers=False),
            "deployment with workers": comparison.deploy(workers=True),
        }
    rounds = make_table(
        "medians over rounds", "", "round s", "slowest client's training s", "round ÷ training"
    )
    for name, sides in measured.items():
        ratio = median(side.seconds / side.training for side in sides)
        seconds, training = (median(getattr(s, k) for s in sides) for k in ("seconds", "training"))
        rounds.add_row(name, f"{seconds:.1f}", f"{training:.1f}", f"{ratio:.3f}")
    show(f"{len(_CLIENTS)} clients, {_STEPS} steps per round, tiny")
    show(rounds)


if __name__ == "__main__":
    main()
