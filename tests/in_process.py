"""Runs of the real strategies and the real ClientApp in one process, without a SuperLink.

For tests and for measurements of many runs, since Flower takes longer to start than a tiny model to
run.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from client_app.kept import Kept, keeping_in
from client_app.main import app as client_app
from federation.messages import to_arrays
from federation.run_config import Scalar, parse_run_config
from federation.status import RunStatus
from finetuning.adapters.adapter import State
from finetuning.model.base_model import locate
from finetuning.model.fingerprint import fingerprint
from server_app.main import STRATEGIES, first_adapter
from strategies.journal import Progress


def identified(messages: Iterable[Message]) -> list[Message]:
    """Assign an id to each message, as Flower's grids do when they push it."""
    sent = list(messages)
    for message in sent:
        message.metadata.__dict__["_message_id"] = str(uuid4())
    return sent


class InProcessGrid(Grid):
    """Passes each message directly to the ClientApp, one SuperNode after another.

    Args:
        run_config: Run config of every ClientApp.
        nodes: Node config of each SuperNode by node id.
    """

    def __init__(
        self, run_config: Mapping[str, Scalar], nodes: Mapping[int, Mapping[str, Scalar]]
    ) -> None:
        # Flower marks every message with the run of the process that creates it.
        TaskIdentity.run_id = TaskIdentity.task_id = 1
        TaskIdentity.node_id = 0
        self._run_config = dict(run_config)
        self._nodes = nodes
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Any:
        """Raise: there is no run outside this process."""
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Raise: messages are made by their constructor."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return all SuperNodes: they are always connected."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Ask the clients, and return the id of each message."""
        sent = identified(messages)
        self._ask(sent)
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the answers to messages that have one, each once."""
        return [self._replies.pop(each) for each in message_ids if each in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the answer to every message."""
        return [self._answer(message) for message in messages]

    def _ask(self, messages: Iterable[Message]) -> None:
        replies = self.send_and_receive(messages)
        self._replies |= {reply.metadata.reply_to_message_id: reply for reply in replies}

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(
            run_id=1,
            node_id=node,
            node_config=dict(self._nodes[node]),
            state=RecordDict(),
            run_config=self._run_config,
        )
        return client_app(message, context)


class ConcurrentGrid(InProcessGrid):
    """Passes train messages to all SuperNodes at the same time, each in a thread.

    With ``split.schedule = "client-batch"`` clients wait for each other within every step. Each has
    a model of its own. Other messages are passed one after another: the evaluation before round 1
    loads each client's model, and libraries change functions of the whole process while they load.
    """

    def __init__(
        self, run_config: Mapping[str, Scalar], nodes: Mapping[int, Mapping[str, Scalar]]
    ) -> None:
        super().__init__(run_config, nodes)
        self._kept: dict[int, Kept] = {node: {} for node in nodes}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Return the answer to every message."""
        sent = list(messages)
        if any(message.metadata.message_type != MessageType.TRAIN for message in sent):
            return super().send_and_receive(sent)
        with ThreadPoolExecutor(max(1, len(sent))) as pool:
            return list(pool.map(self._answer, sent))

    def _answer(self, message: Message) -> Message:
        with keeping_in(self._kept[message.metadata.dst_node_id]):
            return super()._answer(message)


class MemoryJournal:
    """A journal that keeps everything in memory.

    Attributes:
        events: Lines of ``metrics.jsonl``.
        adapters: The global adapter after each round.
        kept: Each client's personalised adapter.
        personalised_by_round: Each client's personalised adapter after each round.
        progress: Progress of the run at the last checkpoint.
        status: What the run is doing now.
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.adapters: dict[int, State] = {}
        self.kept: dict[str, State] = {}
        self.personalised_by_round: dict[int, dict[str, State]] = {}
        self.progress = Progress("bench")
        self.status = RunStatus()
        self._previous = self.progress
        self._scratch = TemporaryDirectory()

    @property
    def scratch(self) -> Path:
        """Folder that is deleted with the journal."""
        return Path(self._scratch.name)

    def show(self, status: RunStatus) -> None:
        """Keep the status."""
        self.status = status

    def record(self, event: Mapping[str, Any]) -> None:
        """Keep an event."""
        self.events.append(dict(event))

    def keep_personalised(
        self, client: str, state: State, round_number: int, size: int, file: Path | None = None
    ) -> None:
        """Keep a client's adapter."""
        self.kept[client] = state
        self.personalised_by_round.setdefault(round_number, {})[client] = state

    def personalised(self, client: str) -> tuple[int, State] | None:
        """Return a client's last adapter and its round."""
        rounds = [number for number, kept in self.personalised_by_round.items() if client in kept]
        return (max(rounds), self.kept[client]) if rounds else None

    def checkpoint(self, progress: Progress, state: State) -> None:
        """Keep the global adapter."""
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
) -> MemoryJournal:
    """Run simulated clients through all rounds.

    Args:
        values: The run config.
        state_path: Folder of the clients' state.
        clients: Number of clients.
        grid: Grid that connects to the clients; None for a new ``InProcessGrid``.
        start: Progress and global adapter to continue from; ``state_path`` must have the clients'
            state at that time. None starts a new run.
        rounds: Number of the last round; None for that of the run config.
        together: Whether the clients of a new grid work at the same time.

    """
    values = {"min-nodes": clients, **values, "state-path": str(state_path)}
    config = parse_run_config(values)
    nodes = {i + 1: {"partition-id": i, "num-partitions": clients} for i in range(clients)}
    base = locate(config.model.name)
    journal = MemoryJournal()
    progress, state = start or (journal.progress, first_adapter(config, base)[0])
    strategy = STRATEGIES[config.strategy](config, fingerprint(base), progress, journal)
    last = config.rounds if rounds is None else rounds
    connect = ConcurrentGrid if together else InProcessGrid
    strategy.start(grid or connect(values, nodes), to_arrays(state), last)
    return journal
