"""FedJudge's methods on its three legal tasks: trained in this process, scored on all rows."""

import json
import statistics
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.common.config import flatten_dict

from bench.paper.cells import LegalCell, Result
from bench.paper.legal import ASKED, CENTER_CLIENTS, CLIENTS, MODELS
from bench.paper.legal_data import legal_rows
from bench.paper.legal_scoring import LegalScoring
from bench.paper.sizes import FedJudge, Size
from bench.paper.sources import Sources
from finetuning.adapters.adapter import State
from finetuning.data.rows import read_rows
from finetuning.model.base_model import locate
from tests.in_process import MemoryJournal, run_in_process

_PRESETS = Path(__file__).parents[2] / "presets" / "baselines"
_WEEK = 7 * 24 * 3600.0
_SCORING = {
    *("dtype", "batch_size", "max_length", "prompt_length", "questions", "new_tokens"),
    *("encoder", "encoder_layer"),
}


@dataclass(frozen=True)
class Trained:
    """The adapters of a method.

    Attributes:
        last: Each model's adapter after the last round, in the order of `MODELS`; None for none.
        personalised: Each client's personalised adapter after each round, if the method has any.
        penalty_share: Mean share of the penalty in the gradient norm; None without a penalty.

    """

    last: list[State | None]
    personalised: list[list[State]]
    penalty_share: float | None


def settings_of(cell: LegalCell, size: Size) -> dict[str, Any]:
    """Return the settings that a cell's result depends on."""
    scoring = {"asked": dict(ASKED), **size.fedjudge.model_dump(include=_SCORING)}
    if cell.method == "bare":
        return {"scoring": scoring}
    run = _run_config(cell, size.fedjudge)
    del run["seed"]
    return {"scoring": scoring, "rows": size.fedjudge.rows, "run": run}


def measure(cell: LegalCell, size: Size, sources: Sources) -> Result:
    """Train a method, and score its models on the held-out rows of all clients.

    Returns:
        ``scores`` by model and client; ``rows`` by client, its `LegalRows.counts`;
        ``answers`` by model and client to the question of `ASKED`;
        of strategies also ``rounds`` by client, the scores of its personalised model on its own
        rows after each round, and ``penalty_share``.

    """
    names, settings = MODELS[cell.method], size.fedjudge
    directory = locate(sources.model(cell.model))
    with TemporaryDirectory() as folder:
        trained = _train(cell, settings, sources, Path(folder))
    scoring = LegalScoring(sources.model(cell.model), settings, sources)
    result: Result = {
        "scores": {},
        "answers": {},
        "penalty_share": trained.penalty_share,
        "rows": {
            client: legal_rows(sources.parts(client), directory, settings).counts
            for client in CLIENTS
        },
    }
    for name, state in zip(names, trained.last, strict=True):
        with scoring.using(state):
            result["scores"][name] = scoring.scores(CLIENTS)
            answers = scoring.answers(list(ASKED.values()))
            result["answers"][name] = dict(zip(ASKED, answers, strict=True))
    if trained.personalised:
        result["rounds"] = {}
        for client, name, states in zip(CLIENTS, names[1:], trained.personalised, strict=True):
            rounds = result["rounds"][client] = []
            for state in states[:-1]:
                with scoring.using(state):
                    rounds.append(scoring.scores([client])[client])
            rounds.append(result["scores"][name][client])
    return result


def _train(cell: LegalCell, settings: FedJudge, sources: Sources, folder: Path) -> Trained:
    if cell.method == "bare":
        return Trained([None], [], None)
    values = _run_config(cell, settings) | {
        "model.name": sources.model(cell.model),
        "data.path": str(_write_clients(folder / "data", cell.model, settings, sources)),
    }
    clients = 1 if "data.pool" in values else len(CLIENTS)
    journal = run_in_process(values, folder / "state", clients)
    final = journal.adapters[settings.rounds]
    if clients == 1:
        return Trained([final], [], None)
    personalised = [
        [journal.personalised_by_round[number + 1][client] for number in range(settings.rounds)]
        for client in CLIENTS
    ]
    return Trained([final, *(s[-1] for s in personalised)], personalised, _penalty_share(journal))


def _run_config(cell: LegalCell, settings: FedJudge) -> dict[str, Any]:
    """Return the run config of a method: the preset of the baseline, at this size.

    The model and the data are missing.
    """
    preset = {"center": "center", "fedjudge-base": "fedavg", "fedjudge-cl": "fedjudge-cl"}
    file = _PRESETS / f"{preset.get(cell.method, 'center-client')}.toml"
    values: dict[str, Any] = flatten_dict(tomllib.loads(file.read_text(encoding="utf-8")))
    if cell.method in CENTER_CLIENTS:
        values["data.pool"] = CENTER_CLIENTS[cell.method]
    if cell.method == "fedjudge-cl":
        values["continual.lambda"] = settings.weight
        values["continual.importance-examples"] = settings.importance_examples
    share = len(CLIENTS) if cell.method == "center" else 1
    return values | {
        "seed": cell.seed,
        "rounds": settings.rounds,
        "round-timeout": _WEEK,
        "model.dtype": settings.dtype,
        "adapter.rank": settings.rank,
        "adapter.alpha": settings.alpha,
        "adapter.targets": settings.targets,
        "data.max-length": settings.max_length,
        "train.local-steps": share * settings.local_steps,
        "train.batch-size": settings.batch_size,
        "train.accumulation": settings.accumulation,
        "train.learning-rate": settings.learning_rate,
        "train.max-gradient-norm": settings.max_gradient_norm,
        "evaluate.every": settings.rounds,
        "evaluate.generate": False,
    }


def _write_clients(folder: Path, model: str, settings: FedJudge, sources: Sources) -> Path:
    """Write a folder for each client, with its first training rows that fit.

    Models are scored here and not by the run, which therefore has one held-out row.
    """
    directory = locate(sources.model(model))
    for client in CLIENTS:
        parts = sources.parts(client)
        train, test = legal_rows(parts, directory, settings).train, read_rows(parts[1])[:1]
        (folder / client).mkdir(parents=True)
        for name, rows in (("train", train), ("test", test)):
            lines = (json.dumps({"messages": row.messages}) for row in rows)
            (folder / client / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def _penalty_share(journal: MemoryJournal) -> float | None:
    shares = [e["penalty_gradient_share"] for e in journal.events if "penalty_gradient_share" in e]
    return statistics.mean(shares) if shares else None
