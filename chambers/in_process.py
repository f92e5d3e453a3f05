"""Runs in this process: messages are passed to the ClientApp directly, without a SuperLink.

The ServerApp and the ClientApp work as in a simulation, but starting a simulation would take longer
than training a small model.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from client_app.kept import Kept, keeping_in
from client_app.main import app as client_app
from federation.flower_internals import TaskIdentity
from federation.run_config import Scalar
from server_app.main import app as server_app


class InProcessGrid(Grid):
    """Passes each message directly to the ClientApp, one SuperNode after another.

    ``nodes`` contains the SuperNodes' node configs, keyed by node id. If ``together``, train
    messages are passed to all SuperNodes concurrently, each in a thread: with
    ``split.schedule = "client-batch"``, clients wait for each other within every step. Each client
    then has its own model. Messages of other types are still passed one after another, because
    evaluation before round 1 loads models, and libraries patch global functions to load them.
    """

    def __init__(
        self,
        run_config: Mapping[str, Scalar],
        nodes: Mapping[int, Mapping[str, Scalar]],
        together: bool = False,
    ) -> None:
        # Flower marks every message with the process's run and node, which are set here.
        TaskIdentity.run_id = TaskIdentity.task_id = 1
        TaskIdentity.node_id = 0
        self._run_config = dict(run_config)
        self._nodes = nodes
        self._kept: dict[int, Kept] = {node: {} for node in nodes} if together else {}
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Any:
        """Raise ``NotImplementedError``: no SuperLink stores the run."""
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Raise ``NotImplementedError``: messages are created with ``Message``."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all SuperNodes, which are always connected."""
        return list(self._nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Assign ids to messages, as Flower's grids do, and pass them to the clients."""
        sent = list(messages)
        for message in sent:
            message.metadata.__dict__["_message_id"] = str(uuid4())
        self._ask(sent)
        return [message.metadata.message_id for message in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the available replies to the messages; return each reply only once."""
        return [self._replies.pop(each) for each in message_ids if each in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Pass the messages to their clients, and return all replies."""
        sent = list(messages)
        training = all(message.metadata.message_type == MessageType.TRAIN for message in sent)
        if not (self._kept and training):
            return [self._answer(message) for message in sent]
        with ThreadPoolExecutor(max(1, len(sent))) as pool:
            return list(pool.map(self._answer, sent))

    def _ask(self, messages: Iterable[Message]) -> None:
        replies = self.send_and_receive(messages)
        self._replies |= {reply.metadata.reply_to_message_id: reply for reply in replies}

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        context = Context(1, node, dict(self._nodes[node]), RecordDict(), self._run_config)
        with keeping_in(self._kept[node]) if self._kept else nullcontext():
            return client_app(message, context)


def run_in_process(
    values: Mapping[str, Scalar], clients: int, policies: Sequence[Path] = ()
) -> None:
    """Execute a complete run as in a simulation; raise the ServerApp's error if the run fails.

    ``policies`` has the file of each client's site policy; empty for none.
    """
    nodes: dict[int, dict[str, Scalar]] = {
        i + 1: {"partition-id": i, "num-partitions": clients} for i in range(clients)
    }
    for node, policy in enumerate(policies, start=1):
        nodes[node]["policy"] = str(policy)
    together = values.get("split.schedule") in {"client-batch", "hierarchical"}
    grid = InProcessGrid(values, nodes, together)
    server_app(grid, Context(1, 0, {}, RecordDict(), dict(values)))
