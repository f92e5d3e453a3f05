"""Clients that haven't replied yet: name them in the log, and notice those that are gone."""

import math
import time
from collections.abc import Collection, Mapping
from logging import INFO

from flwr.common import log
from flwr.serverapp import Grid

from federation.flower_internals import InMemoryGrid


class SilentClients:
    """The clients whose replies to messages sent now are awaited.

    The log names them after ``seconds``, and then each time the waiting time has doubled: training
    may take long. ``names`` are the clients' names by node id. In a simulation, no client is named,
    because clients also wait for a free process.
    """

    def __init__(self, grid: Grid, seconds: float, names: Mapping[int, str]) -> None:
        self._grid = grid
        self._names = names
        self._since, self._started = time.time(), time.monotonic()
        self._next = math.inf if isinstance(grid, InMemoryGrid) else seconds

    def look(self, nodes: Collection[int]) -> set[int]:
        """If the log should name these clients now, do so; return those no longer connected."""
        passed = time.monotonic() - self._started
        if passed < self._next or not nodes:
            return set()
        while self._next <= passed:
            self._next *= 2
        connected = {node.node_id: node.last_activated_at for node in self._grid.get_nodes()}
        if silent := {node: connected[node] for node in nodes if node in connected}:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self._since))
            described = [f"{self._name(node)} ({_connected(at)})" for node, at in silent.items()]
            text = "Waiting since %s UTC (%.0f s) for replies: %s"
            log(INFO, text, since, passed, ", ".join(sorted(described)))
        return set(nodes) - connected.keys()

    def _name(self, node: int) -> str:
        return self._names.get(node) or f"node {node}"


def _connected(since: str) -> str:
    """Describe a SuperNode that has been connected since a time in ISO format, if known."""
    if not since:
        return "its SuperNode is connected"
    return f"its SuperNode has been connected since {since[:19].replace('T', ' ')} UTC"
