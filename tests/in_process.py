"""Runs of the real strategies and the real ClientApp in one process, with a journal in memory."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.serverapp import Grid
from safetensors.torch import load_file

from chambers.in_process import InProcessGrid
from federation.messages import to_arrays
from federation.run_config import Scalar, parse_run_config
from federation.run_folder import RunStatus
from finetuning.adapters.adapter import State
from finetuning.model.fingerprint import fingerprint
from finetuning.model.locating import locate
from server_app.main import STRATEGIES, first_adapter
from strategies.journal import Progress


class MemoryJournal:
    """A journal that stores everything in memory.

    Attributes:
        events: Lines of ``metrics.jsonl``.
        adapters: The global adapter after each round.
        kept: Each client's latest personalised adapter.
        personalised_by_round: Each client's personalised adapter after each round.
        progress: Progress of the run at the last checkpoint.
        status: Latest status of the run.
        shown: All statuses so far.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.adapters: dict[int, State] = {}
        self.kept: dict[str, State] = {}
        self.personalised_by_round: dict[int, dict[str, State]] = {}
        self.progress = Progress("bench")
        self.status = RunStatus()
        self.shown: list[RunStatus] = []
        self._previous = self.progress
        self._scratch = TemporaryDirectory()

    @property
    def scratch(self) -> Path:
        """Folder that is deleted with the journal."""
        return Path(self._scratch.name)

    def show(self, status: RunStatus) -> None:
        """Store the status."""
        self.status = status
        self.shown.append(status.model_copy())

    def record(self, event: Mapping[str, Any]) -> None:
        """Store an event."""
        self.events.append(dict(event))

    def keep_personalised(
        self, client: str, state: State | Path | None, round_number: int, size: int
    ) -> None:
        """Store a client's adapter, unless only the client knows it."""
        if state is None:
            return
        state = load_file(state) if isinstance(state, Path) else state
        self.kept[client] = state
        self.personalised_by_round.setdefault(round_number, {})[client] = state

    def personalised(self, client: str) -> tuple[int, State] | None:
        """Return a client's latest adapter, and the adapter's round."""
        rounds = [number for number, kept in self.personalised_by_round.items() if client in kept]
        return (max(rounds), self.kept[client]) if rounds else None

    def checkpoint(self, progress: Progress, state: State) -> None:
        """Store the global adapter."""
        if progress.finished_rounds > self.progress.finished_rounds:
            self._previous = self.progress
        self.progress = progress
        self.adapters[progress.finished_rounds] = state

    def discard(self, round_number: int) -> None:
        """Drop a round's global adapter."""
        if self.adapters.keys() - {round_number}:
            self.adapters.pop(round_number, None)
            self.progress = self._previous


def run_in_process(
    values: Mapping[str, Scalar],
    state_path: Path,
    clients: int,
    grid: Grid | None = None,
    start: tuple[Progress, State] | None = None,
    rounds: int | None = None,
    together: bool = False,
    agreed: Mapping[str, int] | None = None,
) -> MemoryJournal:
    """Run simulated clients through all rounds.

    Args:
        values: The run config.
        state_path: Folder of the clients' state.
        clients: Number of clients.
        grid: Grid that connects to the clients; None for a new ``InProcessGrid``.
        start: Progress and global adapter to continue from; ``state_path`` must contain the
            clients' state of that time. None starts a new run.
        rounds: Number of the last round; None for that of the run config.
        together: Whether clients of a new grid run concurrently.
        agreed: The agreed numbers of rows by name, as in a deployment; None for a simulation.

    """
    values = {"min-nodes": clients, **values, "state-path": str(state_path)}
    config = parse_run_config(values)
    nodes = {i + 1: {"partition-id": i, "num-partitions": clients} for i in range(clients)}
    base = locate(config.model.name)
    journal = MemoryJournal()
    progress, state = start or (journal.progress, first_adapter(config, base)[0])
    kind, digests = STRATEGIES[config.strategy], fingerprint(base)
    strategy = kind(config, digests, progress, journal, agreed=agreed)
    last = config.rounds if rounds is None else rounds
    strategy.start(grid or InProcessGrid(values, nodes, together), to_arrays(state), last)
    return journal
