"""Create events of ``metrics.jsonl``."""

from collections.abc import Mapping
from logging import WARNING
from typing import Any, Literal

from flwr.common import log

from federation.answers import MODELS
from finetuning.adapters.robust_aggregation import MAX_DISTANCE
from strategies.journal import Journal

What = Literal["update", "update at the server", "data size", "importance"]
_FAR = f"is more than {MAX_DISTANCE:g} times as large as the other clients' median"
_REASONS: dict[What, str] = {
    "update": _FAR,
    "update at the server": _FAR,
    "data size": "exceeds the maximum share of a client (max-share)",
    "importance": "is far above the typical values of all clients",
}


def evaluation_events(metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split metrics like ``global.loss`` into one event for each evaluated model."""
    events = []
    for model in MODELS:
        prefix = f"{model}."
        own = {k.removeprefix(prefix): v for k, v in metrics.items() if k.startswith(prefix)}
        if own:
            events.append({**{underscored(k): v for k, v in own.items()}, "model": model})
    return events


def underscored(key: str) -> str:
    """Return a key as it is spelled in ``metrics.jsonl``, with underscores."""
    return key.replace("-", "_")


def record_scaled(
    journal: Journal, server_round: int, what: What, factors: Mapping[str, float]
) -> None:
    """Log and record each client whose contribution was scaled down, by a factor below 1."""
    for name, factor in factors.items():
        if factor < 1:
            log(WARNING, "%s: its %s is scaled by %.2g: it %s", name, what, factor, _REASONS[what])
            event = {"event": "scaled", "round": server_round, "client": name}
            journal.record({**event, "what": what, "factor": factor})
