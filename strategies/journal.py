"""Where a strategy writes down what it does; the server app has the files behind it."""

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
        """Give what ``keep_personalised`` saved last for a client."""
        ...

    def checkpoint(
        self,
        round_number: int,
        state: State,
        importance: State | None,
        optimizers: State | None,
        evaluated: bool,
    ) -> None:
        """Save the global adapter after a round, J, and the server's optimizers, if there are."""
        ...
