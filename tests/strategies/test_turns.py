"""Simulated clients that wait for an actor: Flower's own grid, and one actor for all clients."""

import threading
import time
from contextlib import contextmanager

from flwr.app import Message, MessageType, RecordDict
from flwr.proto.task_pb2 import Task
from flwr.server.superlink.fleet.vce.vce_api import _register_nodes
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import RunRecord
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid import InMemoryGrid

from federation.messages import problem_of
from strategies.exchange import exchange
from strategies.silence import SilentClients

SECONDS = 0.4
UNKNOWN = 12345


@contextmanager
def simulated(clients: int):
    """Return a grid whose clients take turns, and the ids of their nodes."""
    factory = LinkStateFactory(
        FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory()
    )
    state, run = factory.state(), Run.create_empty(1)
    run.primary_task_id, run.federation_id = 1, NOOP_FEDERATION_ID
    state.run_ids[1] = RunRecord(run=run)
    state.task_store[1] = Task(task_id=1, run_id=1)
    grid = InMemoryGrid(factory)
    grid.set_run(run)
    nodes = list(_register_nodes(clients, factory))
    over = threading.Event()

    def answer():
        while not over.wait(0.01):
            for node in nodes:
                for message in state.get_message_ins(node_id=node, limit=1):
                    over.wait(SECONDS)
                    reply = Message(RecordDict(), reply_to=message)
                    reply.metadata.__dict__["_message_id"] = str(time.monotonic())
                    state.store_message_res(reply)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield grid, nodes
    finally:
        over.set()
        thread.join(10)


def test_waiting_for_an_actor_costs_a_client_no_time(one_run, caplog):
    with simulated(clients=4) as (grid, nodes):
        messages = [Message(RecordDict(), n, MessageType.TRAIN, ttl=60.0) for n in nodes]
        silent = SilentClients(grid, 0.1 * SECONDS, {})
        replies = list(exchange(grid, messages, timeout=1.5 * SECONDS, silent=silent))
    assert len(replies) == 4 and "Waiting" not in caplog.text


def test_a_message_that_could_not_be_sent_is_no_silence(one_run):
    with simulated(clients=2) as (grid, nodes):
        asked = [nodes[0], UNKNOWN, nodes[1]]
        messages = [Message(RecordDict(), n, MessageType.TRAIN, ttl=60.0) for n in asked]
        replies = {r.metadata.src_node_id: r for r in exchange(grid, messages, timeout=60.0)}
    assert replies.keys() == set(asked)
    assert problem_of(replies[UNKNOWN]) == "the message to it could not be sent"
    assert all(replies[node].has_content() for node in nodes)
