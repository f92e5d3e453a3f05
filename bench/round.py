"""What a federated round takes beside its slowest client's training, and what for.

    python -m bench.round [--steps 150] [--rounds 4] [--clients 2] [--model /models/…]

The same run of FedJudge-Base in simulation, in a deployment with a SuperLink and SuperNodes on this
machine, and in one whose institutions have resident workers. Every process has one torch thread;
clients train at the same time, so there should be a core for each. The first round, in which
processes start and workers load the model, doesn't count. A round lasts from its train messages to
the average. In deployments it is divided by the times in the logs of SuperNodes and workers.
They are on loopback with ``--insecure``: no proxy, no TLS, no node keys.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from bench.deployment.deployment import CHECKOUT
from bench.harness import make_table, show
from chambers.superlink import (
    COMPLETED,
    SuperLink,
    free_port,
    private_superlink,
    run_app,
)
from finetuning.generated import STYLES, examples

_ROWS = {"train": 200, "test": 4}
_LINE = re.compile(r"\x1b\[\d+m\w+ (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})\x1b\[0m: +(.*)")
_MARKS = ("Receiving: train", "Loading ClientApp", "is ready in", "Sending: train")
# From one mark in the logs to the next, which together are the round.
_PARTS = (
    "the SuperNode polls for the message",
    "the message's process starts and imports Flower",
    "it imports the app, or hands over",
    "data and base model are checked",
    "the adapter is trained",
    "the model is loaded; the adapter saved and handed back",
    "the reply waits for the other clients and the ServerApp",
)


@dataclass(frozen=True)
class Round:
    """A measured round.

    Attributes:
        seconds: Its duration.
        training: Duration of its slowest client's training.
        parts: What the round of this client consists of, in the order of ``_PARTS``; empty in
            simulation.

    """

    seconds: float
    training: float
    parts: list[float]


@dataclass(frozen=True)
class Comparison:
    """The run that is measured.

    Attributes:
        folder: Folder for everything that it reads and writes.
        config: Its run config.
        clients: The clients' names.

    """

    folder: Path
    config: Mapping[str, Any]
    clients: tuple[str, ...]

    def simulate(self) -> list[Round]:
        """Run it in simulation."""
        home = self.folder / "simulation"
        with private_superlink(home) as link:
            config = {"data.path": str(self.folder / "data")}
            return self._run(link, home, config, simulated=True)

    def deploy(self, workers: bool) -> list[Round]:
        """Run it on SuperNodes, with or without resident workers."""
        home = self.folder / ("workers" if workers else "processes")
        with private_superlink(home, simulated=False) as link, ExitStack() as stack:
            link.environment["FLWR_LOG_LEVEL"] = "DEBUG"  # which gives every line its time
            for name in self.clients:
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
            run_config={**self.config, **folders, **config},
            supernodes=len(self.clients) if simulated else None,
        )
        if status != COMPLETED:
            raise SystemExit(f"the run ended with {status}; its logs were in {home}")
        (directory,) = (home / "runs").iterdir()
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event.get("round", 0) > 1]
        averaged = {} if simulated else _times_of_averages(directory)
        rounds = []
        for event in events:
            if event["event"] != "round":
                continue
            number, seconds = event["round"], float(event["seconds"])
            trained = [e for e in events if e["event"] == "train" and e["round"] == number]
            slowest = max(trained, key=lambda e: float(e["seconds"]))
            name, training = str(slowest["client"]), float(slowest["seconds"])
            parts = []
            if not simulated:
                logs = home.glob(f"{name}*.log")
                marks = sorted(line for log in logs for line in _lines(log))
                end = averaged[number]
                parts = _parts(marks, begin=end - seconds, end=end, training=training)
            rounds.append(Round(seconds, training, parts))
        return rounds


def _times_of_averages(directory: Path) -> dict[int, float]:
    """Return when each round's replies were averaged, which TensorBoard's events tell."""
    (file,) = (directory / "tensorboard").iterdir()
    times: dict[int, float] = {}
    for event in EventFileLoader(str(file)).Load():
        if any("/train/" in value.tag for value in event.summary.value):
            times.setdefault(int(event.step), float(event.wall_time))
    return times


def _parts(
    lines: Sequence[tuple[float, str]], begin: float, end: float, training: float
) -> list[float]:
    """Divide a round of a client by the marks in the logs of its SuperNode and worker."""
    marks: dict[str, tuple[float, str]] = {}
    for time, text in lines:
        for mark in _MARKS:
            if begin < time < end and mark in text:
                marks[mark] = time, text
    if len(marks) < len(_MARKS):
        raise SystemExit(f"the logs have only {', '.join(marks) or 'nothing'} of a round")
    received, loading, ready, sending = (marks[mark][0] for mark in _MARKS)
    opening = float(marks["is ready in"][1].split()[-2])
    return [
        received - begin,
        loading - received,
        ready - opening - loading,
        opening,
        training,
        sending - ready - training,
        end - sending,
    ]


def _lines(file: Path) -> Iterator[tuple[float, str]]:
    """Yield time and text of a log's lines."""
    for time, text in _LINE.findall(file.read_text(errors="replace")):
        yield datetime.strptime(time, "%Y-%m-%d %H:%M:%S,%f").timestamp(), text


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


def _write_data(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        for part, count in _ROWS.items():
            rows = examples(style=name, count=count, seed=0, split=part)  # type: ignore[arg-type]
            lines = [json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows]
            (folder / name / f"{part}.jsonl").write_text("".join(lines))


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each round")
    parser.add_argument("--rounds", type=int, default=4, help="the first of them doesn't count")
    parser.add_argument("--clients", type=int, default=2, help="at most 3")
    parser.add_argument("--model", default="tiny")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    clients = tuple(STYLES[: arguments.clients])
    config = {
        "strategy": "fedjudge-base",
        "rounds": arguments.rounds,
        "min-nodes": len(clients),
        "model.name": arguments.model,
        "train.local-steps": arguments.steps,
        "evaluate.every": arguments.rounds,
    }
    with tempfile.TemporaryDirectory() as folder:
        _write_data(Path(folder) / "data", clients)
        comparison = Comparison(Path(folder), config, clients)
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
    deployments = [name for name in measured if name != "simulation"]
    parts = make_table("seconds of a round, for its slowest client", "", *deployments)
    for index, part in enumerate(_PARTS):
        cells = [median(side.parts[index] for side in measured[name]) for name in deployments]
        parts.add_row(part, *(f"{cell:.2f}" for cell in cells))
    show(f"{len(clients)} clients, {arguments.steps} steps per round, {arguments.model}")
    show(rounds, parts)


if __name__ == "__main__":
    main()
