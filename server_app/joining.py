"""What joining a run brought: the losses and right answers of models trained alone and together."""

import math
from collections.abc import Mapping
from math import isfinite
from statistics import fmean
from typing import Any

from federation.messages import MODELS
from federation.run_folder import Event
from finetuning.generated import clients, matters

# Texts of answers by client, question and reference, and model.
Questions = dict[str, dict[tuple[str, str], dict[str, str]]]


def count_rows(latest: Mapping[str, Mapping[str, Event]]) -> str:
    """Return, in words, on how many held-out rows of each client the losses are; "" if unknown."""
    models = [model for own in latest.values() for model in own.values() if "loss" in model]
    counts = {model.get("examples", 0) for model in models}
    if not counts or 0 in counts:
        return ""
    least, most = min(counts), max(counts)
    rows = f"{least} row" + "s" * (least > 1) if least == most else f"{least} to {most} rows"
    return f" of {rows} each" if len(latest) > 1 else f" of {rows}"


def mean_losses(latest: Mapping[str, Mapping[str, Event]]) -> dict[str, dict[str, str]]:
    """Return the mean loss of each model, over the clients for which all current losses are known.

    The mean of a group of masked sums counts as often as it has members.
    """
    rounds = [own["global"].get("round", 0) for own in latest.values() if "global" in own]
    whole = [
        own
        for own in latest.values()
        if all(isfinite(model.get("loss", math.nan)) for model in own.values())
        and own.get("global", {}).get("round", 0) == max(rounds, default=0)
    ]
    if not whole:
        return {}
    weights = [len(next(iter(own.values())).get("clients", [""])) for own in whole]
    count = sum(weights)
    clients = f"{count} client" + "s" * (count > 1)
    return {
        f"mean held-out loss{count_rows(latest)} (lower is better), {clients}": {
            name: f"{fmean([own[name]['loss'] for own in whole], weights):.3f}" for name in whole[0]
        }
    }


def is_on_matters(config: Mapping[str, Any]) -> bool:
    """Return whether the rows are generated, and each client has some of the topics (matters)."""
    return not config.get("data.path") and config.get("data.generated") == "matters"


def count_schools(latest: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Return the number of simulated clients with some of the matters each; 0 if there are none.

    ``latest`` has the clients that have trained. In a deployment, they have rows of their own.
    """
    names = {clients.name_client("matters", number) for number in range(len(latest))}
    is_simulated = latest.keys() == names and len(names) <= len(matters.MATTERS)
    return len(names) if is_simulated and is_on_matters(config) else 0


def count_right(answers: Questions, schools: int) -> dict[str, dict[str, str]]:
    """Return, by kind of question and model, how many shown answers equal the reference.

    The last questions of each of the ``schools`` are on its own matters; with 0, kinds aren't told
    apart.
    """
    divided = matters.divide(schools, seed=0)
    known = {clients.name_client("matters", number): len(own) for number, own in enumerate(divided)}
    shown: dict[str, dict[str, list[bool]]] = {}
    for client, own in answers.items():
        for index, ((_, reference), texts) in enumerate(own.items()):
            kind = ""
            if client in known:
                is_own = index >= len(matters.MATTERS) - known[client]
                kind = " on own topics" if is_own else " on topics that only others have"
            for model, text in texts.items():
                is_right = text.strip() == reference.strip()
                shown.setdefault(kind, {}).setdefault(model, []).append(is_right)
    return {
        f"right answers{kind}": {
            m: f"{sum(rights[m])} of {len(rights[m])}" for m in MODELS if m in rights
        }
        for kind, rights in shown.items()
    }
