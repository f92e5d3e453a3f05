"""Report clients whose contribution to an average was scaled down."""

from collections.abc import Mapping
from logging import WARNING
from typing import Literal

from flwr.common import log

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


def record_scaled(
    journal: Journal, server_round: int, what: What, factors: Mapping[str, float]
) -> None:
    """Log and record each client whose contribution was scaled down: its factor is below 1."""
    for name, factor in factors.items():
        if factor < 1:
            log(WARNING, "%s: its %s is scaled by %.2g: it %s", name, what, factor, _REASONS[what])
            event = {"event": "scaled", "round": server_round, "client": name}
            journal.record({**event, "what": what, "factor": factor})
