"""The interface through which a strategy records a run; the server app writes the files."""

from collections.abc import Mapping
from typing import Any, Protocol

from strategies.messages import State


class Journal(Protocol):
    """Records of a run."""

    def record(self, event: Mapping[str, Any]) -> None:
        """Append an event to ``metrics.jsonl``."""
        ...

    def keep_personalised(self, client: str, state: State, round_number: int, size: int) -> None:
        """Save a client's personalised adapter: its local one after the round's training."""
        ...

    def personalised(self, client: str) -> State | None:
        """Return what ``keep_personalised`` saved last for a client, or None."""
        ...

    def checkpoint(
        self,
        round_number: int,
        state: State,
        importance: State | None,
        optimizers: State | None,
        evaluated: bool,
    ) -> None:
        """Save the global adapter after a round, and J and the server's optimizers if any."""
        ...
