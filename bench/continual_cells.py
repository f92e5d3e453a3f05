"""Single runs of ``bench.continual``: each leaves a file, and is not repeated if the file exists.

All runs of a seed share round 1, in which no penalty applies: it is computed once, and its adapter,
importance and the clients' state are kept.
"""

import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from finetuning.files import replacing, write_json

CLIENTS = 3
_LINEAGE = "bench"
# A share is found if its odds, share / (1 - share), are within this factor.
_TOLERANCE = 1.2
_MAX_TRIALS = 8
_FIRST_WEIGHT = 0.003
Event = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What all cells have in common.

    Attributes:
        folder: Folder of the results.
        values: The run config without seed, λ and importance.

    """

    folder: Path
    values: Mapping[str, Any]

    def config(self, seed: int, weight: float, importance: str) -> dict[str, Any]:
        """Return the run config of a cell."""
        return dict(self.values) | {
            "strategy": "fedjudge-cl",
            "seed": seed,
            "continual.lambda": weight,
            "continual.importance": importance,
        }


def first_round(experiment: Experiment, seed: int) -> Path:
    """Run round 1 of a seed, unless it is in the folder; return where."""
    directory = experiment.folder / f"seed-{seed}-round-1"
    if directory.is_dir():
        return directory
    from safetensors.torch import save_file

    run = _prepare()
    with replacing(directory) as aside:
        aside.mkdir(parents=True)
        journal = run(experiment.config(seed, 0.0, "server"), aside / "state", CLIENTS, rounds=1)
        save_file(journal.adapters[1], aside / "adapter.safetensors")
        save_file(journal.progress.importance or {}, aside / "importance.safetensors")
        (aside / "events.json").write_text(json.dumps(journal.events, indent=1) + "\n")
    return directory


def cell(experiment: Experiment, seed: int, weight: float, importance: str) -> dict[str, Any]:
    """Run the rounds after the first with one λ, unless the result is in the folder.

    Returns:
        ``global`` and ``personalised`` held-out losses by client after the last round, means over
        the clients and rounds of ``share`` (the penalty's share of the gradient norm) and
        ``distance`` (s), and ``seconds``.

    """
    name = f"{importance}-{weight:g}" if weight else "base"
    file = experiment.folder / f"seed-{seed}-{name}.json"
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    started = time.monotonic()
    events = _continue(experiment, seed=seed, weight=weight, importance=importance)
    result = {
        "seed": seed,
        "lambda": weight,
        "importance": importance,
        "share": _mean(events, "penalty_gradient_share"),
        "distance": _mean(events, "importance_distance"),
        "global": _losses(events, "global"),
        "personalised": _losses(events, "personalised"),
        "seconds": round(time.monotonic() - started, 1),
    }
    write_json(file, result)
    return result


def calibrate(
    experiment: Experiment, seed: int, importance: str, shares: list[float]
) -> dict[float, float]:
    """Find the λ with which the penalty has each share of the gradient norm in round 2.

    Every trial trains round 2; trials are kept, and used for all shares.

    Returns:
        λ by share.

    Raises:
        SystemExit: A share isn't reached by any λ that was tried.

    """
    file = experiment.folder / f"calibration-{importance}.json"
    trials: list[list[float]] = json.loads(file.read_text()) if file.is_file() else []
    found = {}
    for share in shares:
        for _ in range(_MAX_TRIALS):
            near = min(trials, key=lambda trial: _apart(trial[1], share), default=None)
            if near and _apart(near[1], share) <= math.log(_TOLERANCE):
                found[share] = near[0]
                break
            weight = _next_weight(trials, share)
            events = _continue(
                experiment, seed=seed, weight=weight, importance=importance, rounds=2
            )
            trials.append([weight, _mean(events, "penalty_gradient_share")])
            write_json(file, trials)
        else:
            raise SystemExit(f"no λ gives the penalty {share:.0%} of the gradient norm: {trials}")
    return found


def _next_weight(trials: list[list[float]], share: float) -> float:
    """Return a λ to try, from the line through the two nearest trials in logarithms.

    With one trial, the odds of the share are taken to be proportional to λ.
    """
    if not trials:
        return _FIRST_WEIGHT
    nearest = sorted(trials, key=lambda trial: _apart(trial[1], share))[:2]
    (x, y), *others = [(math.log(weight), _logit(found)) for weight, found in nearest]
    slope = (y - others[0][1]) / (x - others[0][0]) if others else 1.0
    # A slope from two trials that are close together is mostly noise.
    slope = min(max(slope, 0.3), 1.5)
    return float(f"{math.exp(x + (_logit(share) - y) / slope):.3g}")


def _logit(share: float) -> float:
    return math.log(share / (1 - share))


def _apart(found: float, share: float) -> float:
    return abs(_logit(found) - _logit(share))


def _continue(
    experiment: Experiment, seed: int, weight: float, importance: str, rounds: int | None = None
) -> list[Event]:
    """Run the rounds after the first, up to ``rounds``; return their events."""
    from dataclasses import replace

    from safetensors.torch import load_file

    from strategies.journal import Progress

    before = first_round(experiment, seed)
    progress = Progress(_LINEAGE, finished_rounds=1, evaluated=True)
    progress = replace(progress, importance=dict(load_file(before / "importance.safetensors")))
    adapter = dict(load_file(before / "adapter.safetensors"))
    values = experiment.config(seed, weight, importance)
    if rounds is not None:  # a calibration needs no losses
        values["evaluate.every"] = values["rounds"]
    with TemporaryDirectory() as state:
        copytree(before / "state", state, dirs_exist_ok=True)
        run = _prepare()
        start = (progress, adapter)
        events: list[Event] = run(values, Path(state), CLIENTS, start=start, rounds=rounds).events
        return events


def _prepare() -> Any:
    """Return ``run_in_process``, with a quiet log."""
    import logging

    from tests.in_process import run_in_process

    logging.getLogger("flwr").setLevel("WARNING")
    return run_in_process


def _mean(events: list[Event], key: str) -> float:
    return float(statistics.mean(e[key] for e in events if e["event"] == "train"))


def _losses(events: list[Event], model: str) -> dict[str, float]:
    """Return a model's last held-out losses by client."""
    return {
        e["client"]: e["loss"] for e in events if e["event"] == "evaluate" and e["model"] == model
    }
